"""fedjaxsim: private, personalized federated learning, simulated on one accelerator.

Start with `Simulation`. `algorithm.py` defines an algorithm, `privacy/mechanisms/__init__.py` the
mechanism that every message must pass.
"""

import lazy_loader

__version__ = "0.1.0"

# `__init__.pyi` lists the public names. Each is imported when it is first used: JAX stands behind
# most of them, and help must not wait for it.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
