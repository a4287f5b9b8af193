"""Attention in plain torch: runs on every device, and is the oracle of all other backends."""
