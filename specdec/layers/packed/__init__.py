"""Weights that stay in few bits, and products with them, for linear layers and experts."""
