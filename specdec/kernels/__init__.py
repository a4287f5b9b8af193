"""Kernels that torch does not offer by name, one file per library or operation; nothing else
imports those libraries.
"""
