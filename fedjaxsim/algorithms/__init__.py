"""The systems of the papers and their baselines, one file each, written for one client."""

from fedjaxsim.algorithms.systems import SYSTEMS, System

__all__ = ["SYSTEMS", "System"]
