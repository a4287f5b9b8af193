"""What a drafter learns from: prompts, the target's answers, and batches of them. The stages of a
run fill it in order.
"""
