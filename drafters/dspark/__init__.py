"""DSpark (arXiv 2607.05147, deepseek-ai/DeepSpec): a Markov head on DFlash's backbone."""
