"""Requests on the host: from admission to their end. The engine alone changes them."""
