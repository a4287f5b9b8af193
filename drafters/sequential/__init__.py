"""Drafting token by token, as EAGLE-3 heads, prediction layers and draft models do."""
