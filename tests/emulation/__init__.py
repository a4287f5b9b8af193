"""Tests of the emulation of AITER."""
