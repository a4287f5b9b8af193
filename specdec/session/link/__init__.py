"""Callers in other processes than the engine: what goes between them, and the two ends."""
