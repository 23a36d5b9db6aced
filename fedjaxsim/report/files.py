"""Files that are written whole or not at all, and JSON that every reader takes."""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Record = dict[str, Any]


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees the old content or the new one, never a part."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def strict(value: Any) -> Any:
    """The value as strict JSON: arrays become lists, what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if hasattr(value, "__array__"):
        return strict(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _json(value: Any) -> str:
    return json.dumps(strict(value), indent=2, allow_nan=False, ensure_ascii=False)


def write_json(path: Path, value: Any) -> None:
    """Writes strict JSON, atomically."""
    write_atomically(path, f"{_json(value)}\n".encode())


def print_json(value: Any) -> None:
    """Prints strict JSON."""
    print(_json(value))
