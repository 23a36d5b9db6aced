"""What one process measures: one workload, or nothing at all to see what a process takes.

The parent starts `python -m fedjaxsim.bench.measure REQUEST`, REQUEST being JSON, and reads the
last line of output, JSON too.
"""

import ctypes
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fedjaxsim.bench.ceilings import Ceilings
from fedjaxsim.bench.children import end_with_parent
from fedjaxsim.bench.machine import machine
from fedjaxsim.bench.workload import Load
from fedjaxsim.bench.workloads import WORKLOADS
from fedjaxsim.engine.devices import use_all_cores
from fedjaxsim.engine.layout import bytes_of
from fedjaxsim.runs.memory import device_peak_bytes, peak_bytes
from fedjaxsim.runs.settings import RunConfig

Record = dict[str, Any]

LONG_ENOUGH = 0.2
"""Seconds that one repetition takes at least, in as many segments as that needs."""
MB = 1e6


def measure(load: Load, repeats: int, *, ceilings: bool) -> Record:
    """Runs a workload for a while.

    Memory is read twice before the ceilings are measured: with compilation, and without. From then
    on workload, evaluation and ceilings take turns, so that all of them meet the same machine. An
    evaluation follows the rounds directly, as in a run, and finds in the caches what they left.

    Args:
      load: the workload.
      repeats: how often they take turns.
      ceilings: whether the machine's ceilings are measured.

    Returns:
      Medians over the repetitions, by name; docs/benchmarks.md says what they are.
    """
    forget_peak()
    state: Any = jax.block_until_ready(load.init())
    state_bytes = bytes_of(state)

    def advance() -> None:
        nonlocal state
        state = jax.block_until_ready(load.advance(state, load.rounds)[0])

    def evaluate() -> None:
        assert load.evaluate is not None
        load.evaluate(state)

    def both() -> float:
        took = seconds(advance)
        if load.evaluate is not None:
            evaluate()
        return took

    first, peak = both(), peak_bytes()
    give_back_heap()
    forget_peak()
    second = both()
    device_peak = device_peak_bytes(load.devices)
    memory = {
        "peak_mb": peak / MB,
        "running_mb": peak_bytes() / MB,
        "device_peak_mb": None if device_peak is None else device_peak / MB,
        "state_mb": state_bytes / MB,
        "data_mb": load.data_bytes / MB,
    }
    limits = Ceilings(load.devices) if ceilings else None
    segments = max(1, math.ceil(LONG_ENOUGH / second))
    turns = []
    for _ in range(repeats):
        took = seconds(lambda: [advance() for _ in range(segments)]) / (segments * load.rounds)
        turn = {"round": took}
        if load.evaluate is not None:
            evaluation = seconds(evaluate)
            turn["evaluation_share"] = evaluation / (evaluation + RunConfig.eval_every * took)
        if limits is not None:
            turn |= _fractions(load, took, limits.flops(), limits.bandwidth())
        turns.append(turn)
    medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    took = medians.pop("round")
    return {
        "rounds_per_second": 1 / took,
        "updates_per_second": load.work.updates / took,
        "compile_seconds": max(0.0, first - second),
        **medians,
        **memory,
        "gflop_per_round": load.work.flops / 1e9,
        "mb_per_round": load.work.bytes / MB,
        "chunk_size": load.chunk_size,
        "devices": len(load.devices),
        "data": load.data,
    }


def _fractions(load: Load, took: float, flops: float, bandwidth: float) -> dict[str, float]:
    return {
        "gemm_gflops": flops / 1e9,
        "memory_gb_per_s": bandwidth / 1e9,
        "gemm_fraction": load.work.flops / flops / took,
        "memory_fraction": load.work.bytes / bandwidth / took,
    }


def seconds(function: Callable[[], Any]) -> float:
    """How long a call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def forget_peak() -> None:
    """Lets the peak of resident memory start anew from what is resident now, on Linux.

    Elsewhere it stays, and includes what building the data took.
    """
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def give_back_heap() -> None:
    """Gives memory back that was freed, on Linux with glibc.

    A compiler's working memory is freed in pieces, which glibc keeps for what is allocated later.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def idle() -> Record:
    """The memory of a process that has the same imports and has started JAX, and its machine."""
    forget_peak()
    jax.block_until_ready(jnp.zeros(()) + 1)
    return {"peak_mb": peak_bytes() / MB, "machine": machine()}


def main() -> None:
    """Answers one request and ends; or ends at once if the parent does."""
    end_with_parent()
    use_all_cores()
    jax.config.update("jax_enable_compilation_cache", False)
    request = json.loads(sys.argv[1])
    if request["workload"] is None:
        print(json.dumps(idle()))
        return
    workload = WORKLOADS[request["workload"]]
    load = workload.build(request["data"])
    print(json.dumps(measure(load, request["repeats"], ceilings=workload.curve is None)))


if __name__ == "__main__":
    main()
