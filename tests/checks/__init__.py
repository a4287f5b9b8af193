"""Programs to run by hand, most of them on a GPU; CONTRIBUTING names their order."""
