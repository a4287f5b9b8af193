"""From tensors to the layers of a target, one file per kind of layer. Loading alone asks it."""
