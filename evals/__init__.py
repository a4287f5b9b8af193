"""Measurements: how fast, how often drafts are accepted, and whether output is the target's own."""
