"""What a block is trained for and how well it does. The trainer and the last check use it."""
