"""Several drafters as one: for every request the one drafts that promises most."""
