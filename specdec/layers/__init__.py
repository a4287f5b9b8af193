"""What models are made of: linear layers, routing to experts, RoPE, arg max, and a stack of decoder
layers in Triton.
"""
