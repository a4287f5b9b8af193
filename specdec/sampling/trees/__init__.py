"""Drafts on the device: candidates of each position, and the trees made of them."""
