"""Going on with the training of a drafter on requests that were served."""
