"""How tokens are drawn: probabilities of logits, a random stream per request, its numbers."""
