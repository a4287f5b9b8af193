"""Attention over the paged cache. `backend` says what a backend is, `selector` picks one, the other
files are one each.
"""
