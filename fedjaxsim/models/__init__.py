"""Models as pairs of pure functions, from libraries or a user's own code."""

import lazy_loader

# `__init__.pyi` lists the public names; each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
