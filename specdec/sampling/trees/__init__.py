"""Drafts on the device: candidates of each position, and the trees made of them. Drafters build
them, acceptance walks them.
"""
