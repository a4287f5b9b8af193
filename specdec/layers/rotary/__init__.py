"""Rotary position embeddings: frequencies, angles and the rotation itself."""
