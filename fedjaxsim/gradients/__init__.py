"""Derivatives of a whole run with respect to its hyperparameters."""
