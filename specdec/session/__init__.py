"""An engine for callers: threads, handles, texts, and the Python API."""
