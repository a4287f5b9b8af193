"""Latent attention on AITER, and its sparse form."""
