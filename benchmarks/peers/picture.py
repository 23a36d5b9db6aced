"""Draws the rounds per second of fedjaxsim beside its peers, from what `compare.py` measured.

python benchmarks/peers/picture.py docs/figures/peers.png
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from compare import RESULTS
from matplotlib.figure import Figure

from fedjaxsim.report.plots import COLOURS, STYLE, picture, save

ROWS = {
    "fedjaxsim FedAvg, clip and noise": ("fedjaxsim, FedAvg", "clip and noise"),
    "fedjaxsim PMTL, clip and noise": ("fedjaxsim, PMTL", "a model per client, clip and noise"),
    "pfl FedAvg": ("pfl-research, FedAvg", "not private"),
    "pfl FedAvg, clip and noise": ("pfl-research, FedAvg", "clip and noise"),
    "FedJAX FedAvg": ("FedJAX, FedAvg", "not private; it has no noise"),
}
"""Two lines for each run of one workload, from the top of the picture."""
FIRST = "fedjaxsim FedAvg, clip and noise"


def draw(results: Mapping[str, Any]) -> Figure:
    """A bar to the median of each run, a dot for each process, and by how much `FIRST` is faster.

    Args:
      results: of `compare.py`.

    Raises:
      KeyError: if one of `ROWS` was not measured.
    """
    with mpl.rc_context({**STYLE, "axes.grid.axis": "x"}):
        cores = results["machine"]["cores"]
        figure = picture(
            f"Training a CNN on FEMNIST's writers, 100 of 206 a round, on {cores} cores", 6.8, 3.1
        )
        axes = figure.subplots()
        for place, (name, (what, how)) in enumerate(ROWS.items()):
            median = results["summary"][name]["rounds_per_s"]["median"]
            rates = [run[name]["rounds_per_s"] for run in results["repetitions"] if name in run]
            ours = name.startswith("fedjaxsim")
            axes.barh(place, median, 0.62, color=COLOURS[0] if ours else "0.72")
            axes.plot(rates, [place] * len(rates), "o", ms=3, color="0.15", alpha=0.7)
            ratio = results["ratios"].get(f"{FIRST} / {name}")
            slower = f"   {ratio['median']:.1f} times slower" if ratio else ""
            axes.text(max(rates) + 0.07, place, f"{median:.2f}{slower}", va="center")
            axes.text(-0.05, place - 0.14, what, ha="right", va="center")
            axes.text(-0.05, place + 0.2, how, ha="right", va="center", fontsize=7.5, color="0.4")
        axes.set(xlabel="rounds per second", yticks=[], ylim=(len(ROWS) - 0.5, -0.5))
        axes.set_xlim(0, 1.15 * results["summary"][FIRST]["rounds_per_s"]["greatest"])
    return figure


def main() -> None:
    """Draws what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path, help="a .png file")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    save(draw(json.loads(args.results.read_text())), args.picture)


if __name__ == "__main__":
    main()
