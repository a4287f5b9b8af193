"""GGUF files, as llama.cpp writes them: what they say of a model, and its weights."""
