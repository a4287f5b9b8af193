"""Requests on the host: from admission over scheduling to their end. The engine alone changes
them.
"""
