"""Cell arrays of a MATLAB file, read by scipy in another process.

scipy looks up the types of a damaged file beyond the end of its table, which ends the process.
"""

import io
import subprocess
import sys

import numpy as np


def read_cells(path: str) -> dict[str, list[np.ndarray]]:
    """Read the matrices of each cell array of a file, in C order; strings for no real numbers."""
    command = [sys.executable, "-P", __file__, path]  # -P: this folder's modules shadow none
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        messages = done.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(
            messages[-1] if messages else f"scipy ended with the code {done.returncode}"
        )
    cells: dict[str, list[np.ndarray]] = {}
    with np.load(io.BytesIO(done.stdout), allow_pickle=False) as arrays:
        for member, values in arrays.items():
            cells.setdefault(member.partition("/")[0], []).append(values)
    return cells


def _write_cells(path: str) -> None:
    """Write the cells of a file to the standard output, as the bytes of a .npz file."""
    from scipy.io import loadmat, whosmat

    cells = [name for name, _, kind in whosmat(path) if kind == "cell"]
    read, arrays = loadmat(path, variable_names=cells) if cells else {}, {}
    for name in cells:
        for number, matrix in enumerate(read[name].ravel()):
            is_real = isinstance(matrix, np.ndarray) and matrix.dtype.kind in "fiub"
            arrays[f"{name}/{number}"] = matrix if is_real else np.array("")
    target = io.BytesIO()
    np.savez(target, allow_pickle=False, **arrays)
    sys.stdout.buffer.write(target.getvalue())


if __name__ == "__main__":
    _write_cells(sys.argv[1])
