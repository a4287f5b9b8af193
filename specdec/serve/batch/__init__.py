"""Requests that come as lines of a file."""
