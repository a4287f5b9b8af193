"""Attention over the paged cache: what a `backend` is, a `selector`, and one file each."""
