"""Formats of quantized checkpoints, one per file: from the tensors of a linear to its weight."""
