"""Structured output: what it must look like, compiled by xgrammar, followed token by token."""
