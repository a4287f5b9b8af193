"""The optional HTTP server, `specdec serve`: OpenAI's routes around one engine."""
