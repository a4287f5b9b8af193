"""Rotary position embeddings: frequencies, angles and the rotation itself. Attention layers and
drafters use them.
"""
