"""LEAF's JSON format (Caldas et al., "LEAF: a benchmark for federated settings", 2018).

A file holds `{"users": [...], "num_samples": [...], "user_data": {user: {"x": ..., "y": ...}}}`.
"""

import dataclasses
import json
import os
import zipfile
from collections.abc import Iterable
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np

from fedjaxsim.data.arrays import joined, to_float32
from fedjaxsim.data.files import in_file, reading
from fedjaxsim.data.population import Population
from fedjaxsim.data.text import encode

Users = dict[str, dict[str, np.ndarray]]


def load_leaf(path: str | os.PathLike[str]) -> Population:
    """Read a JSON file, a folder of `.json` files, or a zip of either; every user is a client.

    The folders `train` and `test`, if there, are those splits; otherwise all `.json` files are
    training rows. A folder or zip that holds only one folder stands for that folder. Names that
    start with a dot and `__MACOSX` are skipped. Users keep the order of the files (sorted by name)
    and of their `users` lists. A user may appear in only one file per split, since rows of a second
    file are likely to be the same.

    Fractions in x become float32; whole numbers stay integers. Nested labels such as [[-1], [1]]
    are flattened. Text becomes integers, as in `fedjaxsim.data.text.encode`.

    Raises:
      FileNotFoundError: there is no such file or folder.
      ValueError: names the file that is malformed or truncated, disagrees with its own
        `num_samples`, repeats a user, or has a user with test rows but no training rows.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no LEAF data at {path}")
    if path.is_dir():
        splits = {s: _read_all(files) for s, files in _find_files(path).items()}
    elif path.suffix == ".zip" or zipfile.is_zipfile(path):
        with in_file(path), reading("zip file"):
            archive = zipfile.ZipFile(path)
            for name in archive.namelist():
                if {"", ".", ".."} & set(name.removesuffix("/").split("/")):
                    raise ValueError(f"its member {name!r} has no place in a folder")
        with archive:
            files_of = _find_files(zipfile.Path(archive))
            splits = {s: _read_all(files) for s, files in files_of.items()}
    else:
        splits = {"train": _read_all([path])}
    with in_file(path):
        return _population(splits["train"], splits.get("test", {}))


def _find_files(folder: Traversable) -> dict[str, list[Traversable]]:
    """Return the JSON files of each split in a folder or zip."""
    entries = _entries(folder)
    while len(entries) == 1 and (only := next(iter(entries.values()))).is_dir():
        folder, entries = only, _entries(only)
    if all(split in entries and entries[split].is_dir() for split in ("train", "test")):
        found = {split: _json_files(entries[split]) for split in ("train", "test")}
    else:
        found = {"train": _json_files(folder)}
    for files in found.values():
        if not files:
            raise ValueError(f"{folder} holds no *.json files to read")
    return found


def _entries(folder: Traversable) -> dict[str, Traversable]:
    return {each.name: each for each in folder.iterdir() if not _is_litter(each.name)}


def _json_files(folder: Traversable) -> list[Traversable]:
    files = [e for e in folder.iterdir() if e.name.endswith(".json") and not _is_litter(e.name)]
    return sorted(files, key=lambda file: file.name)


def _is_litter(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


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
        if not isinstance(document, dict) or not isinstance(document.get("user_data"), dict):
            raise ValueError("not LEAF JSON: it must hold an object 'user_data'")
        data = document["user_data"]
        users, sizes = document.get("users"), document.get("num_samples")
        if not isinstance(users, list) or not isinstance(sizes, list):
            raise ValueError("not LEAF JSON: 'users' and 'num_samples' must be lists")
        names = [str(user) for user in users]
        if len(set(names)) < len(names) or set(names) != set(data):
            raise ValueError("'users' must list each user of 'user_data' once")
        if len(sizes) != len(names):
            raise ValueError(f"'num_samples' has {len(sizes)} entries for {len(names)} users")
        return {
            name: _checked(data[name], size, f"user {name!r}")
            for name, size in zip(names, sizes, strict=True)
        }


def _compact(node: dict[str, Any]) -> dict[str, Any]:
    """Turn one user's lists into arrays as soon as they are parsed: lists take 8 times as much.

    Other nodes are left for `_checked`, which knows the user.
    """
    if not (isinstance(node.get("x"), list) and isinstance(node.get("y"), list)):
        return node
    try:
        x, y = _array(node["x"]), _array(node["y"])
    except ValueError:
        return node
    if x.dtype.kind == "f":
        x = to_float32(x)
    is_column = y.size == len(y) and y.dtype.kind != "U"  # a list of one word stays a list
    return {"x": x, "y": y.reshape(-1) if is_column else y}


def _array(rows: list[Any]) -> np.ndarray:
    """Return rows of numbers, strings, or lists of strings, padded to equal length."""
    words = bool(rows) and all(isinstance(row, list) and _are_strings(row) for row in rows)
    if words:
        longest = max(map(len, rows))
        rows = [[*row, *[""] * (longest - len(row))] for row in rows]
    array = np.asarray(rows)
    if array.dtype.kind == "U" and not words and not _are_strings(rows):
        raise ValueError("numbers and strings in one field")
    return array


def _are_strings(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _checked(data: Any, size: Any, where: str) -> dict[str, np.ndarray]:
    if not isinstance(data, dict) or not {"x", "y"} <= set(data):
        raise ValueError(f"{where} must have lists 'x' and 'y'")
    for field in ("x", "y"):
        values = data[field]
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiubU":
            raise ValueError(f"{where}: {field!r} must be numbers in rows of equal length, or text")
        if len(values) != len(data["x"]) or len(values) != size:
            raise ValueError(
                f"{where} has {len(values)} rows of {field!r}, {len(data['x'])} of 'x' "
                f"and num_samples {size!r}; all must agree"
            )
    return data


def _population(train: Users, test: Users) -> Population:
    test = {user: data for user, data in test.items() if len(data["y"]) > 0}
    strangers = [user for user in test if user not in train or len(train[user]["y"]) == 0]
    if strangers:
        raise ValueError(
            f"user {strangers[0]!r} has test rows but no training rows; each user needs some: "
            "split LEAF data by sample, not by user"
        )
    clients, categories, public = encode([*train.values(), *test.values()])
    owners = [*train, *test]
    fields, counts = joined(clients, owners)
    position = {user: k for k, user in enumerate(train)}
    client = np.repeat([position[user] for user in owners], counts)
    split = np.repeat([0, 2], [sum(counts[: len(train)]), sum(counts[len(train) :])])
    population = Population.from_rows(fields, client, list(train), split)
    return dataclasses.replace(population, categories=categories, public=public)
