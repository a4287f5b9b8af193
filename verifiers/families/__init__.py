"""Families of targets, a file for each, or for a few that share most of what is said of them.

`FAMILIES` of every file is a `verifiers.family.Family` for each model type, as transformers
names it; `verifiers.config.families` finds the files.
"""
