"""The systems of the papers and their baselines, one file each, written for one client."""

import lazy_loader

from fedjaxsim.algorithms.systems import SYSTEMS, System

__all__ = ["SYSTEMS", "System"]

# The package lists them among its names; optax and JAX, which they import, start slowly.
__getattr__, _, _ = lazy_loader.attach(__name__, ["optimizers", "shared_model"])
