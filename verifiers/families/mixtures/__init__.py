"""Families of mixtures of experts that have little in common."""
