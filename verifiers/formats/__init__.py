"""Formats of quantized checkpoints, one per file: from the tensors of one linear layer to its
weight.
"""
