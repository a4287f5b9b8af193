"""The nouns of a step: the protocols of target and drafter, and the batches they are given. Others
build on it.
"""
