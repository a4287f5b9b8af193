"""Random malformed input of every kind that strangers can bring: a result or one line, in bounds.

`python -m tests.fuzz --kind schemas --seconds 3600 --seed 1` goes on as long as it is told, and
prints what breaks and how to repeat it; `cases.jsonl` holds what was found before.
"""
