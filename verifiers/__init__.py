"""Targets: Hugging Face models on the paged cache, which of them can be run,
and the embedded one.
"""
