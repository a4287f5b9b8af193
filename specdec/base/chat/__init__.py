"""Conversations: messages and templates, and where an output thinks."""
