"""Independent draft models: a small language model, of any family that runs as a target, drafts for
a large one.
"""
