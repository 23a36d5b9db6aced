"""Samplers besides plain Poisson sampling, and how it is made fast."""
