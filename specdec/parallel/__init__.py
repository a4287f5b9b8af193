"""Several processes that compute one model together: their group, and what they exchange."""
