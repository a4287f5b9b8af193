"""From files to the tensors of a target, whole or a rank's shard. Building takes layers from it."""
