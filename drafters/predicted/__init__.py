"""Drafts copied from what a request says its output will be like, beside those of any drafter."""
