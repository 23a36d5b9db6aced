"""LEAF's JSON format (Caldas et al., "LEAF: a benchmark for federated settings", 2018).

A file holds `{"users": [...], "num_samples": [...], "user_data": {user: {"x": ..., "y": ...}}}`.
"""

import contextlib
import json
import os
import zipfile
from collections.abc import Iterable
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np

from fedjaxsim.data.arrays import SPLITS, split_called, to_float32
from fedjaxsim.data.files import in_file, members_of, reading
from fedjaxsim.data.population import Population
from fedjaxsim.data.source import Source
from fedjaxsim.data.text import encode

Users = dict[str, dict[str, np.ndarray]]


def load_leaf(path: str | os.PathLike[str]) -> Population:
    """Read a JSON file, a folder of `.json` files, or a zip of either; every user is a client.

    The folders `train` and `test` or `val`, if there, are those splits; otherwise all `.json` files
    are training rows. A folder or zip that holds only one folder stands for that folder. Names that
    start with a dot and `__MACOSX` are skipped. Users keep the order of the files (sorted by name)
    and of their `users` lists. A user may appear in only one file per split, since rows of a second
    file are likely to be the same. Users without training rows are left out, with a warning.

    Fractions in x become float32; whole numbers stay integers. Nested labels such as [[-1], [1]]
    are flattened. Text becomes integers, as in `fedjaxsim.data.text.encode`.

    Raises:
      FileNotFoundError: there is no such file or folder.
      ValueError: names the file that is malformed or truncated, or repeats a user.
    """
    return read_leaf(path).population(path)


def read_leaf(path: str | os.PathLike[str]) -> Source:
    """Read users with their numbers or text; see `load_leaf`."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no LEAF data at {path}")
    folder: Any = path
    with contextlib.ExitStack() as stack:
        if path.is_file() and (path.suffix == ".zip" or zipfile.is_zipfile(path)):
            with in_file(path), reading("zip file"):
                archive = stack.enter_context(zipfile.ZipFile(path))
                for name in archive.namelist():
                    if {"", ".", ".."} & set(name.removesuffix("/").split("/")):
                        raise ValueError(f"its member {name!r} has no place in a folder")
                folder = zipfile.Path(archive)
        files_of = _find_files(folder) if folder.is_dir() else {"train": [path]}
        splits = {split: _read_all(files) for split, files in files_of.items()}
    with in_file(path):
        return _source(splits)


def _find_files(folder: Traversable) -> dict[str, list[Traversable]]:
    """Return the JSON files of each split in a folder or zip."""
    shown = members_of(folder)
    while len(shown) == 1 and shown[0].is_dir():
        folder, shown = shown[0], members_of(shown[0])
    splits = {split_called(child.name): child for child in shown if child.is_dir()}
    parts = {"train": folder}
    if 0 in splits and len(splits) > 1 + (None in splits):
        parts = {SPLITS[k]: child for k, child in splits.items() if k is not None}
    files = {}
    for name, part in parts.items():
        files[name] = [file for file in members_of(part) if file.name.endswith(".json")]
        if not files[name]:
            raise ValueError(f"{part} holds no *.json files to read")
    return files


def _read_all(files: Iterable[Traversable]) -> Users:
    users: Users = {}
    origin: dict[str, Traversable] = {}
    for file in files:
        for user, data in _read(file).items():
            if user in users:
                raise ValueError(f"user {user!r} is in both {origin[user]} and {file}")
            users[user], origin[user] = data, file
    return users


def _read(file: Traversable) -> Users:
    with in_file(str(file)):
        with reading("JSON file"), file.open("rb") as stream:
            document = json.load(stream, object_hook=_compact)
        content = document if isinstance(document, dict) else {}
        users, data = content.get("users"), content.get("user_data")
        listed = [*map(str, users)] if isinstance(users, list) else []
        if not isinstance(data, dict) or sorted(listed) != sorted(data):
            raise ValueError("not LEAF JSON: 'users' must list the users of the object 'user_data'")
        for user in listed:
            of = data[user] if isinstance(data[user], dict) else {}
            for field in ("x", "y"):
                if not isinstance(of.get(field), np.ndarray):
                    wanted = "numbers in rows of equal length, or text"
                    raise ValueError(f"user {user!r}: {field!r} must be {wanted}")
            if len(of["x"]) != len(of["y"]):
                raise ValueError(f"user {user!r} has {len(of['x'])} x but {len(of['y'])} y")
        return {user: data[user] for user in listed}


def _compact(node: dict[str, Any]) -> dict[str, Any]:
    """Turn one user's lists into arrays as soon as they are parsed: lists take 8 times as much.

    What is no rows of numbers of one shape, and no strings, stays for `_read`.
    """
    if not all(isinstance(node.get(field), list) for field in ("x", "y")):
        return node
    arrays: dict[str, Any] = {}
    for name in ("x", "y"):
        rows = node[name]
        with contextlib.suppress(ValueError):
            array = np.asarray(rows)
            if array.dtype.kind in "fiub" or all(isinstance(row, str) for row in rows):
                arrays[name] = array
    x, y = arrays.get("x"), arrays.get("y")
    if x is not None and x.dtype.kind == "f":
        arrays["x"] = to_float32(x)
    if y is not None and y.size == len(y):
        arrays["y"] = y.reshape(-1)
    return arrays


def _source(splits: dict[str, Users]) -> Source:
    names = [*dict.fromkeys(user for name in SPLITS for user in splits.get(name, ()))]
    position = {user: k for k, user in enumerate(names)}
    parts = [
        (user, split, data)
        for split, name in enumerate(SPLITS)
        for user, data in splits.get(name, {}).items()
        if len(data["y"]) > 0
    ]
    if not parts:
        raise ValueError("no user has rows")
    users = [user for user, _, _ in parts]
    counts = [len(data["y"]) for _, _, data in parts]
    fields = {field: [data[field] for _, _, data in parts] for field in ("x", "y")}
    arrays, categories, public = encode(fields, [f"client {user!r}, field " for user in users])
    return Source(
        arrays,
        np.repeat([position[user] for user in users], counts),
        np.array(names),
        np.repeat([split for _, split, _ in parts], counts),
        {"public": public, "categories": categories},
    )
