"""Steps that are captured once and replayed. The engine makes and replays them; warm-up and
self-checks drive it.
"""
