"""`specdec eval`: tasks of lm-eval, plain and speculative."""
