"""What a decoder computes between matrix products: one interface, in torch and kernels."""
