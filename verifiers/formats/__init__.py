"""Formats of quantized checkpoints, one per file: tensors of one linear layer to its weight."""
