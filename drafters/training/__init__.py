"""Training DFlash drafters: the target's own answers, the training loop, and the check against the
real engine.
"""
