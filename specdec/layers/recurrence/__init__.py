"""Layers that keep a state instead of keys and values, in plain torch and in kernels. Decoder
layers use them through `Ops`.
"""
