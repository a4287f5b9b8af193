"""The first day of specdec on an AMD GPU: `python -m tests.checks.amd_first_day`, in a checkout
with `.[dev,eval]` installed.

Checks and measures everything that nobody without such a GPU could, step by step, and leaves one
page and one JSON to send back as an issue. A step that fails or takes too long does not keep the
others from running. The same command goes on after an interruption.
"""
