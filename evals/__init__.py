"""Measurements: how fast, how often drafts are accepted, and whether the output is the target's
own.
"""
