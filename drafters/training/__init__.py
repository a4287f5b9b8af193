"""Training DFlash drafters: the target's answers, the loop, the check against the engine."""
