"""Mixtures of experts: how they are chosen and multiplied with, in plain torch and in kernels.
Feed-forward layers use them.
"""
