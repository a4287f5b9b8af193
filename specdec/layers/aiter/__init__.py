"""AITER's kernels between the products of a layer. They are taken by name alone."""
