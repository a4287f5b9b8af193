"""Files of checkpoints, before anything is known of the model in them."""
