"""Other systems, measured on the same prompts in the same run."""
