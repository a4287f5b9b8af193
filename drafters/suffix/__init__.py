"""Suffix decoding: drafts copied from what a text's end was followed by before, in the request
itself and in past outputs.
"""
