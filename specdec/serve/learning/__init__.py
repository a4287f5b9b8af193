"""Learning from what is served: finished requests that are kept, and a drafter trained on them."""
