"""JSON schemas and patterns, checked and put into the compiler's words for makers of grammars."""
