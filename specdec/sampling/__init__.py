"""How tokens are drawn: probabilities from logits, a random stream and numbers per request."""
