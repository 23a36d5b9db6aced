"""Populations of clients: partitions and transformations of their data, and readers in `tables`."""

import lazy_loader

# `__init__.pyi` lists the public names; each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
