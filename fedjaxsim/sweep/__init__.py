"""Sweeps: many runs of one simulation in one program, and what becomes of them."""

from fedjaxsim.sweep.runs import ManyRuns

__all__ = ["ManyRuns"]
