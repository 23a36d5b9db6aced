"""Draws which folder of the package imports which: before everything had a folder, and now.

    python experiments/imports.py docs/figures/imports.png --before 86a6070

A dot in row A and column B says that files of A import B; its area grows with how many do. The rows
and columns are in the order of the layers, so that what lies right of the diagonal runs downhill.
"""

import argparse
import ast
import collections
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import matplotlib as mpl
from matplotlib.figure import Figure

BEFORE = """
cli demo tune bench sweep hypergrad fixed_point reverse testing experiment reads feasible
config plans rundir states plots progress files simulation sharding checks loop evaluation
rounds algorithms optimizers privacy algorithm models data hparams exchange products threefry
"""
AFTER = """
cli tune bench runs report testing audit gradients simulation engine algorithms privacy
algorithm models data hyperparameters metrics factories extras notebook fast
"""
"""What lies at the top of the package, from the highest layer down."""


def imports(revision: str) -> collections.Counter[tuple[str, str]]:
    """How many files of one folder, or module of the top, import another one."""
    names = git("ls-tree", "-r", "--name-only", revision, "fedjaxsim").splitlines()
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for name in names:
        if not name.endswith(".py") or name == "fedjaxsim/__init__.py":
            continue
        home = PurePosixPath(name).parts[1].removesuffix(".py")
        others = set()
        for node in ast.walk(ast.parse(git("show", f"{revision}:{name}"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedjaxsim"):
                parts = (node.module or "").split(".")
                others |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        found.update((home, other) for other in others - {home})
    return found


def git(*arguments: str) -> str:
    """What a git command prints."""
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def draw(
    panels: Mapping[str, tuple[Sequence[str], collections.Counter[tuple[str, str]]]],
) -> Figure:
    """One matrix for each version."""
    with mpl.rc_context({"font.size": 7, "axes.grid": True, "grid.alpha": 0.25}):
        figure = Figure(figsize=(12, 6.4), layout="constrained")
        axes = figure.subplots(1, len(panels), width_ratios=[len(o) for o, _ in panels.values()])
        for panel, (title, (order, edges)) in zip(axes, panels.items(), strict=True):
            place = {name: index for index, name in enumerate(order)}
            for (home, other), files in edges.items():
                x, y = place[other], place[home]
                colour = "#0072B2" if x > y else "#D55E00"
                panel.scatter(x, y, s=12 * files**0.7, color=colour, zorder=3)
            uphill = sum(place[other] < place[home] for home, other in edges)
            panel.plot([-0.5, len(order) - 0.5], [-0.5, len(order) - 0.5], color="0.6", lw=0.8)
            panel.set_xticks(range(len(order)), order, rotation=90)
            panel.set_yticks(range(len(order)), order)
            panel.set(xlim=(-0.5, len(order) - 0.5), ylim=(len(order) - 0.5, -0.5), aspect="equal")
            panel.set_title(
                f"{title}: {len(order)} names at the top, {uphill} arrows uphill (orange)"
            )
            panel.set_xlabel("is imported")
            panel.set_ylabel("imports")
    return figure


def main() -> None:
    """Reads two revisions and draws them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--before", default="86a6070", help="a revision with the old layout")
    parser.add_argument("--after", default="HEAD", help="a revision with the new one")
    arguments = parser.parse_args()
    figure = draw(
        {
            "before": (BEFORE.split(), imports(arguments.before)),
            "now": (AFTER.split(), imports(arguments.after)),
        }
    )
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
