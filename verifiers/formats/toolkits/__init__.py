"""Checkpoints of toolkits, which write several kinds of weights."""
