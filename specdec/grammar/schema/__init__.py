"""JSON schemas and patterns, checked and put into the compiler's words. The makers of grammars ask
it.
"""
