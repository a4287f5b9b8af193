"""Which device there is, and which kernels may be trusted on it. Kernels and whoever places tensors
ask it.
"""
