"""Structured output: what an output must look like, compiled by xgrammar, followed by token."""
