"""From files to the tensors of a target, whole or a rank's share. Building takes layers from it."""
