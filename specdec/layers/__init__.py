"""What models are made of: linear layers, experts, RoPE, arg max, and a stack of decoder layers."""
