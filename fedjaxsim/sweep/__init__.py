"""Sweeps: many runs of one simulation in one program, and what becomes of them."""
