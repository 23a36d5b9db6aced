"""The readers and partitions that `--data` and `--partition` name.

A new one is a file, and an entry here. Nothing heavy is imported, so that the command line knows
the names at once.
"""

from pathlib import Path
from typing import Self

from fedjaxsim import checks
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.factories import is_user_code

_DATA = "fedjaxsim.data"

GENERATED = {
    "digits": f"{_DATA}.tables.generated:read_digits",
    "random": f"{_DATA}.tables.generated:random_rows",
    "synthetic": f"{_DATA}.tables.generated:synthetic_regression",
    "synthetic-low-rank": f"{_DATA}.tables.generated:low_rank_regression",
    "synthetic-group-sparse": f"{_DATA}.tables.generated:group_sparse_regression",
    "synthetic-stream": f"{_DATA}.tables.generated:regression_stream",
}
"""Readers of data without a path, as "module:function"; every reader returns a `Source`."""
IN_FILES = {
    "csv": f"{_DATA}.tables.table:read_file",
    "folder": f"{_DATA}.npz:read_folder",
    "hf": f"{_DATA}.tables.hugging_face:read_name",
    "images": f"{_DATA}.tables.images:read_images",
    "leaf": f"{_DATA}.tables.leaf:read_leaf",
    "mat": f"{_DATA}.tables.matlab:read_matlab",
    "npz": f"{_DATA}.npz:read_npz",
    "parquet": f"{_DATA}.tables.table:read_file",
}
"""Readers of data at a path, or by a name (hf), their first argument."""
READERS = GENERATED | IN_FILES
TABLES = ("csv", "parquet")
"""Data that are tables."""
SPELLINGS = dict.fromkeys(READERS, "") | dict.fromkeys(IN_FILES, ":PATH") | {"hf": ":NAME"}
SPELLINGS = {kind: f"{kind}{argument}" for kind, argument in SPELLINGS.items()}
"""How `--data` names each of them."""
PARTITIONS = {
    "dirichlet": f"{_DATA}.partition:dirichlet",
    "iid": f"{_DATA}.partition:iid",
    "pathological": f"{_DATA}.partition:pathological",
    "quantity": f"{_DATA}.partition:quantity",
}
"""Factories of populations from rows without clients."""


class DataSpec(str):
    """The name of data: KIND, KIND:PATH, or a user's own reader MODULE:FACTORY."""

    @property
    def is_user_code(self) -> bool:
        """True for a user's reader, which is a function of a module."""
        return is_user_code(self) and self.partition(":")[0] not in READERS

    @property
    def kind(self) -> str:
        """The name of the reader."""
        return str(self) if self.is_user_code else self.partition(":")[0]

    @property
    def path(self) -> str:
        """The path, or a name on Hugging Face's hub; "" without one."""
        return "" if self.is_user_code else self.partition(":")[2]

    @property
    def short_name(self) -> str:
        """The name without kind and folder, as in `patients` of csv:x/patients.csv."""
        return Path(self.partition(":")[2]).stem or str(self)

    @property
    def is_known(self) -> bool:
        """True if there is such a reader, with a path exactly if it reads one."""
        is_generated = self.kind in GENERATED and ":" not in self
        return is_generated or self.is_user_code or (self.kind in IN_FILES and bool(self.path))

    def require_reader(self) -> Self:
        """Return the name; raise a ValueError with the nearest one if there is no such reader."""
        if self.kind not in READERS and not self.is_user_code:
            near, ending = [*READERS], Path(self).suffix[1:]
            if self.path:
                near = [f"{kind}:{self.path}" for kind in IN_FILES]
            elif ending in IN_FILES:
                near = [f"{ending}:{self}"]
            hint = checks.did_you_mean(self, near, cutoff=0.5)
            allowed = f"{', '.join(SPELLINGS.values())} or MODULE:FACTORY{hint}"
            raise SettingError(Name("data"), f" must be {allowed}, got {self[:40]!r}")
        return self

    def require_known(self) -> Self:
        """Return the name; raise a ValueError if it is unknown, or lacks a path or has one."""
        if not self.require_reader().is_known:
            spelling = SPELLINGS[self.kind]
            raise SettingError(Name("data"), f" must be {spelling}, got {self[:40]!r}")
        return self

    @property
    def file(self) -> Path | None:
        """The file or folder that is read; None for names on the hub and data without files."""
        if not self.path or self.kind not in IN_FILES:
            return None
        path = Path(self.path)
        return None if self.kind == "hf" and not path.exists() else path
