"""How tokens are drawn: probabilities from logits, one random stream per request, and the numbers
that requests bring.
"""
