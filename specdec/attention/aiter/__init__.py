"""Attention through the kernels of AITER, on ROCm."""
