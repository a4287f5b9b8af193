"""Weights that stay in few bits, and products with them. Linear layers and experts take them;
formats of checkpoints make them.
"""
