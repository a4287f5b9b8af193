"""Suffix decoding: drafts copied from what followed a text's end before."""
