"""Targets: Hugging Face models on the paged cache, which of them run, and the embedded one."""
