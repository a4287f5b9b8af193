"""Draft models: a small language model, of any family, drafts for a large one."""
