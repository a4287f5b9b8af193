"""An engine for callers: threads, handles, texts, and the Python API. Commands and the server reach
the engine through it.
"""
