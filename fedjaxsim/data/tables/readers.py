"""The readers and partitions that `--data` and `--partition` name.

A new one is a file, and an entry here. Nothing heavy is imported, so that the command line knows
the names at once.
"""

from pathlib import Path
from typing import Self

from fedjaxsim import checks
from fedjaxsim.checks import Name, SettingError

_DATA = "fedjaxsim.data"

GENERATED = {
    "digits": f"{_DATA}.tables.handwritten_digits:digits",
    "random": f"{_DATA}.synthetic:random_rows",
    "synthetic": f"{_DATA}.synthetic:synthetic_regression",
    "synthetic-low-rank": f"{_DATA}.synthetic:low_rank_regression",
    "synthetic-group-sparse": f"{_DATA}.synthetic:group_sparse_regression",
    "synthetic-stream": f"{_DATA}.synthetic:regression_stream",
}
"""Factories of data without a path, as "module:function"."""
IN_FILES = {
    "csv": f"{_DATA}.tables.table:read_file",
    "folder": f"{_DATA}.npz:load_folder",
    "hf": f"{_DATA}.tables.hugging_face:read_name",
    "images": f"{_DATA}.tables.images:read_images",
    "leaf": f"{_DATA}.tables.leaf:load_leaf",
    "mat": f"{_DATA}.tables.matlab:load_matlab",
    "npz": f"{_DATA}.npz:read_npz",
    "parquet": f"{_DATA}.tables.table:read_file",
}
"""Factories of data at a path, or by a name (hf), their first argument."""
READERS = GENERATED | IN_FILES
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
    """The name of data: KIND, or KIND:PATH."""

    @property
    def kind(self) -> str:
        """The name of the reader."""
        return self.partition(":")[0]

    @property
    def path(self) -> str:
        """The path, or a name on Hugging Face's hub; "" without one."""
        return self.partition(":")[2]

    @property
    def is_known(self) -> bool:
        """True if there is such a reader, with a path exactly if it reads one."""
        is_generated = self.kind in GENERATED and ":" not in self
        return is_generated or (self.kind in IN_FILES and bool(self.path))

    def require_reader(self) -> Self:
        """Return the name; raise a ValueError with the nearest one if there is no such reader."""
        if self.kind not in READERS:
            near, ending = [*READERS], Path(self).suffix[1:]
            if self.path:
                near = [f"{kind}:{self.path}" for kind in IN_FILES]
            elif ending in IN_FILES:
                near = [f"{ending}:{self}"]
            hint = checks.did_you_mean(self, near, cutoff=0.5)
            *names, last = SPELLINGS.values()
            allowed = f"{', '.join(names)} or {last}{hint}"
            raise SettingError(Name("data"), f" must be {allowed}, got {self[:40]!r}")
        return self

    def require_known(self) -> Self:
        """Return the name; raise a ValueError if it is unknown, or lacks a path or has one."""
        spelling = SPELLINGS[self.require_reader().kind]
        if not self.is_known:
            raise SettingError(Name("data"), f" must be {spelling}, got {self[:40]!r}")
        return self

    @property
    def file(self) -> Path | None:
        """The file or folder that is read; None for names on the hub and data without files."""
        if not self.path or self.kind not in IN_FILES:
            return None
        path = Path(self.path)
        return None if self.kind == "hf" and not path.exists() else path
