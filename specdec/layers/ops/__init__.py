"""What a decoder computes between its matrix products: one interface, in plain torch and in
kernels. Layers use it.
"""
