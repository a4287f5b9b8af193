"""Several drafters as one: in every step and for every request the one drafts that is expected to
have most accepted.
"""
