"""What a drafter learns from: prompts, the target's answers, and batches of them."""
