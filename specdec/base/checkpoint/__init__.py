"""Files of checkpoints before anything is known of the model; for targets and drafters."""
