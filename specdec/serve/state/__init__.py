"""What the server has done and is doing, for those who watch it."""
