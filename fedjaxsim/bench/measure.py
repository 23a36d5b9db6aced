"""The measurement of one run, in this process."""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjaxsim.divergence import Record
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.keys import seed_key
from fedjaxsim.report.progress import number
from fedjaxsim.runs.build import Experiment, versions
from fedjaxsim.runs.memory import device_peak_bytes, give_back, peak_bytes
from fedjaxsim.simulation import Simulation

LONG_ENOUGH = 0.2
"""Seconds of a repetition, at least, if the run has enough rounds."""
REPETITIONS = 5
MB = 1e6


class Spread(NamedTuple):
    """The median and the range of a number."""

    median: float
    least: float
    greatest: float

    def __str__(self) -> str:
        """Return the median with its range, if it has one: `2.9 (2.7–3.1)`."""
        value_range = f" ({number(self.least)}–{number(self.greatest)})"
        return number(self.median) + (value_range if self.least < self.greatest else "")


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the range of one or more values."""
    return Spread(statistics.median(values), min(values), max(values))


class Rounds:
    """The compiled rounds of a simulation, with no evaluation between them."""

    def __init__(self, simulation: Simulation, hparams: Hyperparameters):
        self._simulation, self._hparams = simulation, simulation.check(hparams)
        self._functions, self._rows = simulation.compiled, simulation.placed

    def start(self, seed: int = 0) -> Any:
        """Return the state before the first round."""
        key = seed_key(seed)
        return jax.block_until_ready(self._functions.init(key, self._hparams))

    def advance(self, state: Any, rounds: int) -> Any:
        """Return the state after `rounds` more rounds of one program, in the buffers of `state`."""
        after, _ = self._functions.rounds(state, self._hparams, self._rows["train"], rounds=rounds)
        return jax.block_until_ready(after)

    def evaluate(self, state: Any) -> Any:
        """Evaluate every client on its test rows."""
        measured = self._functions.evaluate(state, self._hparams, self._rows["test"])
        return self._simulation.summarize("test", measured)


def measure(experiment: Experiment, repetitions: int = REPETITIONS) -> Record:
    """Measure the first rounds of a run, several times.

    A repetition starts the run anew and takes some segments, the rounds between two evaluations,
    and one evaluation, with the caches that the rounds left.

    Returns:
      A dict of medians over the repetitions, and of the range of the speed; see docs/scale.md.
    """
    forget_peak()
    base = peak_bytes()
    config, simulation = experiment.config, experiment.simulation
    run = Rounds(simulation, experiment.hparams)
    length = min(config.eval_every, config.rounds)
    devices = simulation.devices or tuple(jax.devices()[:1])

    def repeat(segments: int) -> tuple[float, float]:
        state = run.start(config.seed)

        def advance() -> None:
            nonlocal state
            for _ in range(segments):
                state = run.advance(state, length)

        return seconds(advance), seconds(lambda: run.evaluate(state))

    first, _ = repeat(1)
    forget_peak()
    second, _ = repeat(1)
    running, of_devices = peak_bytes(), device_peak_bytes(devices)
    segments = min(max(1, math.ceil(LONG_ENOUGH / second)), config.rounds // length)
    turns = [repeat(segments) for _ in range(repetitions)]
    speeds = [segments * length / took for took, _ in turns]
    rate = float(simulation.sampler.rate(experiment.hparams.as_arrays()))
    return {
        "rounds_per_second": statistics.median(speeds),
        "rounds_per_second_range": [min(speeds), max(speeds)],
        "evaluation_seconds": statistics.median(evaluation for _, evaluation in turns),
        "compile_seconds": max(0.0, first - second),
        "rounds_mb": (running - base) / MB,
        "device_peak_mb": None if of_devices is None else of_devices / MB,
        "clients_per_round": rate * simulation.num_clients,
        "chunk_size": simulation.plan_for(experiment.hparams).chunk_size,
        "devices": len(devices),
    }


def seconds(function: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def forget_peak() -> None:
    """Reset the peak of resident memory to the memory in use, on Linux."""
    give_back()
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def machine() -> Record:
    """Describe the machine of this process; starts JAX."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    device = jax.devices()[0]
    return {
        "name": platform.node(),
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "versions": versions(),
    }
