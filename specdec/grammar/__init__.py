"""Structured output: what an output must look like, compiled by xgrammar and followed token by
token.
"""
