"""Families whose layers are transformers' modules, and of which more is to be said."""

from verifiers.family import Family

FAMILIES = {"muse_glimmer_text": Family(wrappers=("muse_glimmer",))}
