"""Mechanisms besides the Gaussian one, one per file."""
