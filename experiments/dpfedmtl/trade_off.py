"""Figure 3 of DPFedMTL: the trade-off curves of its settings, approximate and exact.

python experiments/dpfedmtl/trade_off.py trade-off.png
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from scipy.special import ndtr, ndtri

from fedjaxsim.privacy.accounting import composition
from fedjaxsim.privacy.accounting.profile import Profile
from fedjaxsim.privacy.entries import Entry
from fedjaxsim.privacy.events import GAUSSIAN, PrivacySpend
from fedjaxsim.privacy.samplers import poisson
from fedjaxsim.report.plots import DASHES, STYLE, check_path, picture, save

SIGMAS = (0.0, 0.11, 0.65, 2.42, 9.69)
TYPE_ONE = (1 - np.cos(np.linspace(0, np.pi, 161))) / 2
"""Closer together at both ends, where curves are steep."""


def curve_of(profile: Profile) -> np.ndarray:
    """Return the type II errors that a privacy profile allows at least (Dong, Roth and Su 2022).

    Each (ε, δ(ε)) allows nothing below the lines 1 − δ − e^ε α and e^−ε (1 − δ − α).
    """
    curve = np.zeros_like(TYPE_ONE)
    for epsilon in min(profile.epsilon(1e-8), 50.0) * np.linspace(0, 1, 129) ** 1.5:
        reached = 1 - profile.delta(epsilon)
        steep, flat = reached - np.exp(epsilon) * TYPE_ONE, np.exp(-epsilon) * (reached - TYPE_ONE)
        curve = np.maximum(curve, np.maximum(steep, flat))
    return curve


class Setting(NamedTuple):
    """How the paper runs one data set: K of M clients a round, T rounds."""

    name: str
    clients: int
    cohort: int
    rounds: int

    def exact(self, noise_multiplier: float) -> np.ndarray:
        """Return the curve of the Gaussian mechanism on the sum of clipped messages, zero-out."""
        if noise_multiplier == 0:
            return np.zeros_like(TYPE_ONE)
        p = self.cohort / self.clients
        entries = [Entry(noise_multiplier, p, self.rounds)]
        scheme = poisson(max_rate=1.0).for_clients(self.clients).scheme
        charged = PrivacySpend(scheme, GAUSSIAN, tuple(entries))
        return curve_of(composition.profile([charged], "zero_out"))

    def by_limit(self, sigma: float) -> np.ndarray:
        """Theorem 4.2, with its √T counted once."""
        if sigma == 0:
            return np.zeros_like(TYPE_ONE)
        p = self.cohort / self.clients
        mu = p * math.sqrt(self.rounds * math.expm1(sigma**-2))
        return ndtr(-ndtri(TYPE_ONE) - mu)

    def of_own_scale(self, sigma: float) -> np.ndarray:
        """K clients with noise of 2σCK/M each: on their sum z = 2σK^1.5/M."""
        return self.exact(2 * sigma * self.cohort**1.5 / self.clients)


SETTINGS = (Setting("CelebA", 9343, 20, 400), Setting("FEMNIST", 174, 3, 1000))
PANELS: dict[str, Callable[[Setting, float], np.ndarray]] = {
    "the paper's limit, at σ": Setting.by_limit,
    "exact, central mechanism, z = σ": Setting.exact,
    "exact, at its own z = 2σK$^{1.5}$/M": Setting.of_own_scale,
}


def main(path: Path) -> None:
    """Draw the figure."""
    check_path(path)
    shades = mpl.colormaps["viridis"](np.linspace(0, 0.9, len(SIGMAS)))
    with mpl.rc_context(STYLE):
        figure = picture("DPFedMTL, Figure 3: the errors left to any test", 7.4, 5.1)
        rows = figure.subplots(2, 3, sharex=True, sharey=True)
        for setting, row in zip(SETTINGS, rows, strict=True):
            p = f"{setting.cohort}/{setting.clients}"
            whose = f"{setting.name}, p = {p}, T = {setting.rounds}"
            row[0].set_ylabel(f"{whose}\ntype II error (miss)")
            for (name, curve), axes in zip(PANELS.items(), row, strict=True):
                axes.plot([0, 1], [1, 0], color="0.45", lw=1, ls=(0, (1, 2)), label="a coin")
                for index, sigma in enumerate(SIGMAS):
                    style = {"color": shades[index], "ls": DASHES[index % len(DASHES)]}
                    label = f"σ = {sigma:g}"
                    axes.plot(TYPE_ONE, curve(setting, sigma), **style, label=label, clip_on=False)
                axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", title=name)
        for axes in rows[1]:
            axes.set_xlabel("type I error (false alarm)")
        handles, labels = rows[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    save(figure, path)
    print(f"drew {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
