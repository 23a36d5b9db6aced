"""Samplers besides Poisson sampling and everyone, and how Poisson sampling is made fast."""
