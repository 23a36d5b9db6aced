"""Write the data sets of the comparison of systems as files for `--data npz:FILE`.

    python experiments/systems/data.py $FEDJAXSIM_DATA OUT

`school.npz`: exam scores of 139 schools, without constant columns. `vehicle.npz`: 23 sensors.
`femnist.npz`: 206 writers, 28 × 28 pixels. `shakespeare.npz`: 141 speakers of tiny Shakespeare
(data/tinyshakespeare of karpathy/char-rnn as shakespeare/input.txt), the next character after each
of 80. Two questions with fewer answers are for ../pmtl: `femnist-digit.npz`, whether a character is
a digit, and `shakespeare-2.npz`, the next of 28 symbols after two. `femnist-10.npz`, the digits, is
for ../ppsgd. A data set that is not in the folder is left out. The command splits rows.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import fedjaxsim as fjs
from fedjaxsim.data import load, load_leaf
from fedjaxsim.data.transforms import drop_constant_columns, invert

_PERCENTAGES = [3, 4]
_LENGTH = 80
_LETTERS = " abcdefghijklmnopqrstuvwxyz"


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
    """Writers of characters, on 28 × 28 pixels; ink is 1."""
    rows = invert(load(f"leaf:{folder}/femnist/mytest.json.zip"))
    return rows.with_field("x", lambda x: x.reshape(-1, 28, 28, 1))


def femnist_digit(folder: Path) -> fjs.Population:
    """Writers of characters with the labels 1, a digit, and 0, a letter; paper is 1."""
    rows = load(f"leaf:{folder}/femnist/mytest.json.zip")
    y = (rows.fields["y"] < 10).astype(np.int32)
    return dataclasses.replace(rows, fields={**rows.fields, "y": y}, categories={})


def femnist_ten(folder: Path) -> fjs.Population:
    """Writers of the digits 0 to 9; ink is 1, and writers without a digit are left out."""
    rows = invert(load_leaf(folder / "femnist" / "mytest.json.zip"))
    some = rows.fields["y"] < 10
    writer = np.repeat(np.arange(rows.num_clients), rows.counts.sum(axis=1))
    kept, place = np.unique(writer[some], return_inverse=True)
    fields = {name: values[some] for name, values in rows.fields.items()}
    found = fjs.Population.from_rows(fields, place, rows.names[kept])
    chosen = "Which writers have digits, and so take part, is read from labels and taken as public."
    return dataclasses.replace(found, public=(*rows.public, chosen))


def shakespeare(folder: Path) -> fjs.Population:
    """Speakers with 1,000 characters or more, cut into at most 100 pieces of 80 characters.

    x holds a piece, y the character after each of its characters; no two pieces overlap.
    """
    text = _text(folder)
    symbols = {symbol: place for place, symbol in enumerate(sorted(set(text)))}
    said: dict[str, str] = {}
    for part in text.split("\n\n"):
        speaker, _, words = part.partition(":\n")
        said[speaker] = f"{said.get(speaker, '')}{words}\n"
    clients = {}
    for speaker, words in said.items():
        if len(words) >= 1000:
            size = min(100, (len(words) - 1) // _LENGTH)
            line = np.array([symbols[symbol] for symbol in words[: size * _LENGTH + 1]], np.int32)
            x, y = (line[at:][: size * _LENGTH].reshape(size, _LENGTH) for at in (0, 1))
            clients[speaker] = {"x": x, "y": y}
    return fjs.Population.from_clients(list(clients.values()), list(clients))


def shakespeare_2(folder: Path) -> fjs.Population:
    """Speakers, with the last two characters of each piece of `shakespeare` and the next one.

    Letters have one case, and all else but the space is one more symbol: x holds two unit vectors
    of 28, y one of 28 labels.
    """
    rows = shakespeare(folder)
    symbols = np.array([_LETTERS.find(each.lower()) % 28 for each in sorted(set(_text(folder)))])
    one_hot = np.eye(28, dtype=np.float32)
    rows = rows.with_field("x", lambda x: one_hot[symbols[x[:, -2:]]].reshape(-1, 56))
    return rows.with_field("y", lambda y: symbols[y[:, -1]].astype(np.int32))


def _text(folder: Path) -> str:
    return (folder / "shakespeare" / "input.txt").read_text()


READ: dict[str, Callable[[Path], fjs.Population]] = {
    "school": school, "vehicle": vehicle, "femnist": femnist, "femnist-digit": femnist_digit,
    "femnist-10": femnist_ten, "shakespeare": shakespeare, "shakespeare-2": shakespeare_2,
}  # fmt: skip


def main(folder: Path, out: Path) -> None:
    """Write each data set that the folder holds."""
    out.mkdir(parents=True, exist_ok=True)
    for name, read in READ.items():
        try:
            fjs.data.save_npz(out / f"{name}.npz", read(folder))
        except FileNotFoundError as error:
            print(f"left out {name}: {error}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: data.py FOLDER OUT")
    main(*map(Path, sys.argv[1:]))
