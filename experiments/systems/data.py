"""Write the data sets of the comparison of systems as files for `--data npz:FILE`.

    python experiments/systems/data.py $FEDJAXSIM_DATA OUT

`school.npz`: exam scores of 139 schools, without constant columns. `vehicle.npz`: 23 sensors.
`femnist-7.npz`: 206 writers, the means of 4 × 4 pixels. `shakespeare.npz`: 141 speakers of tiny
Shakespeare (karpathy/char-rnn), the next character after two. A data set that is not in the folder
is left out. The command splits rows.
"""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

import fedjaxsim as fjs
from fedjaxsim.data import load
from fedjaxsim.data.transforms import drop_constant_columns, invert

_PERCENTAGES = [3, 4]
_SYMBOLS = " abcdefghijklmnopqrstuvwxyz"


def school(folder: Path) -> fjs.Population:
    """Schools: two features are percentages and the others 0 or 1; a score lies in 1 to 70."""
    rows = drop_constant_columns(load(f"mat:{folder}/school/school.mat"))
    x, y = rows.fields["x"].copy(), rows.fields["y"]
    x[:, _PERCENTAGES] /= 100
    return dataclasses.replace(rows, fields={**rows.fields, "x": x, "y": (y - 35) / 35})


def vehicle(folder: Path) -> fjs.Population:
    """Sensors that tell two kinds of vehicles apart, with the labels 0 and 1."""
    rows = load(f"leaf:{folder}/vehicle/mytrain.json")
    y = (rows.fields["y"] > 0).astype(np.int32)
    return dataclasses.replace(rows, fields={**rows.fields, "y": y}, categories={})


def femnist(folder: Path) -> fjs.Population:
    """Writers of characters, on 7 × 7 pixels."""
    rows = invert(load(f"leaf:{folder}/femnist/mytest.json.zip"))
    return rows.with_field("x", lambda x: x.reshape(-1, 7, 4, 7, 4).mean((2, 4)).reshape(-1, 49))


def shakespeare(folder: Path) -> fjs.Population:
    """Speakers with 1,000 characters or more: a row for each 20 characters, 50 to 100.

    Letters have one case, and all else but the space is one more symbol: x holds two unit vectors
    of 28, y one of 28 labels.
    """
    said: dict[str, str] = {}
    for part in (folder / "shakespeare" / "input.txt").read_text().split("\n\n"):
        speaker, _, words = part.partition(":\n")
        said[speaker] = f"{said.get(speaker, '')}{words}\n"
    rng, clients = np.random.default_rng(0), {}
    for speaker, words in said.items():
        if len(words) < 1000:
            continue
        text = np.array([_SYMBOLS.find(symbol) % 28 for symbol in words.lower()])
        size = int(np.clip(len(words) // 20, 50, 100))
        place = rng.choice(len(text) - 2, size, replace=False)
        x = np.eye(28, dtype="float32")[text[place[:, None] + [0, 1]]].reshape(size, 56)
        clients[speaker] = {"x": x, "y": text[place + 2]}
    return fjs.Population.from_clients(list(clients.values()), list(clients))


READ: dict[str, Callable[[Path], fjs.Population]] = {
    "school": school, "vehicle": vehicle, "femnist-7": femnist, "shakespeare": shakespeare,
}  # fmt: skip


def main() -> None:
    """Write each data set that the folder holds."""
    parser = argparse.ArgumentParser(description="Write data sets as .npz files.")
    parser.add_argument("folder", type=Path, help="where school/, femnist/ … lie")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, read in READ.items():
        try:
            fjs.data.save_npz(args.out / f"{name}.npz", read(args.folder))
        except FileNotFoundError as error:
            print(f"left out {name}: {error}")


if __name__ == "__main__":
    main()
