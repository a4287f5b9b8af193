"""The nouns of a step: the protocols of target and drafter, and their batches."""
