"""What is measured on: the machine's name, processor, devices and programs."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("fedjaxsim", "jax", "jaxlib", "numpy")


def machine() -> dict[str, Any]:
    """The machine of this process; starts JAX."""
    devices = jax.devices()
    return {
        "name": platform.node(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
    }


def processor() -> str:
    """The name of the processor, where Linux tells."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
