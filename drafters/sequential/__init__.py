"""Drafting token by token: what EAGLE-3 heads, multi-token prediction layers and draft models
share.
"""
