"""Families of which some layers keep a state per request."""
