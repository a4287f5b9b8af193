"""Attention through our own Triton kernels."""
