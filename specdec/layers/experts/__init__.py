"""Mixtures of experts: choosing and multiplying, in plain torch and in kernels."""
