"""What a target's configs say, before a weight is read. All other rooms of this package ask it."""
