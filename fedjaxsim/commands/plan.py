"""The command `fedjaxsim plan`: tables of the memory of a run."""

from collections.abc import Callable
from typing import Any

from fedjaxsim.data.ranges import MOST_ROWS
from fedjaxsim.report.files import print_json
from fedjaxsim.report.progress import bytes_text, print_rows
from fedjaxsim.runs import capacity
from fedjaxsim.runs.build import population_of
from fedjaxsim.runs.capacity import Capacity, Need
from fedjaxsim.runs.memory import this_machine
from fedjaxsim.runs.sizes import sizes_of, sizes_without_data

_HEADINGS = (
    "placement", "memory", "rows", "ranges", "states", "server", "process", "round", "evaluation",
    "needs", "has", "fits",
)  # fmt: skip
_WORDS = {
    "rows": "the examples",
    "ranges": "ranges and names of clients",
    "states": "personal states",
    "server": "the server's state",
    "process": "Python, JAX and compiled programs",
    "round": "working memory of a round",
    "evaluation": "working memory of an evaluation",
}


def prepare_plan(command: Any) -> Callable[[], int]:
    """Plan; return a function that prints the tables.

    Raises:
      FileNotFoundError, ValueError: for bad input.
    """
    config, here = command.settings, this_machine()
    if command.shape is None:
        sizes = sizes_of(population_of(config))
    else:
        assert command.rows_per_client is not None
        sizes = sizes_without_data(
            config, command.shape, config.get("clients"), command.rows_per_client
        )
    machines = {"this machine": here}
    if command.devices is not None and command.device_memory is not None:
        host = here.host if command.host_memory is None else int(1e9 * command.host_memory)
        name = f"{command.devices} accelerators of {command.device_memory:g} GB"
        memory = int(1e9 * command.device_memory)
        machines[name] = here._replace(devices=command.devices, device=memory, host=host)
    plans = {name: capacity.plan(config, sizes, machine) for name, machine in machines.items()}

    def work() -> int:
        if command.json:
            print_json({name: plan.to_json() for name, plan in plans.items()})
            return 0
        first = plans["this machine"]
        print(
            f"{sizes.clients:,} clients with {sizes.num_rows:,} rows (int32 counts {MOST_ROWS:,}), "
            f"{first.parameters:,} numbers of their own each; cohorts of up to {first.capacity:,}"
        )
        for name, plan in plans.items():
            print_rows(_HEADINGS, _table(plan), f"memory on {name}", left=2)
            print(_verdict(plan))
        print(
            f"on disk: {bytes_text(first.folder)} of rows as a folder, up to "
            f"{bytes_text(first.checkpoints)} of checkpoints; compiling takes memory of its own"
        )
        return 0

    return work


def _table(plan: Capacity) -> list[tuple[str, ...]]:
    rows, machine = [], plan.machine
    for each in plan.placed:
        if each.impossible is not None:
            rows.append((each.name, each.impossible, *[""] * (len(_HEADINGS) - 3), "no"))
            continue
        rows += [
            (each.name if not k else "", memory, *_sizes(need, has), _yes(need.peak <= has))
            for k, (memory, need, has) in enumerate(each.memories(machine))
        ]
    return rows


def _sizes(need: Need, has: int) -> tuple[str, ...]:
    lasting = (need.rows, need.ranges, need.states, need.server, need.process)
    return tuple(map(bytes_text, (*lasting, need.round, need.evaluation, need.peak, has)))


def _verdict(plan: Capacity) -> str:
    """Name the placements that fit, or the largest need of the nearest one."""
    if plan.fitting:
        return f"fits: {', '.join(each.name for each in plan.fitting)}"
    memory, need, has = plan.nearest.binding(plan.machine)
    needed, there, most = map(bytes_text, (need.peak, has, getattr(need, need.largest)))
    return (
        f"nothing fits: {plan.nearest.name} comes nearest, needs {needed} on the {memory}, "
        f"which has {there}; the largest part is {most} for {_WORDS[need.largest]}"
    )


def _yes(fits: bool) -> str:
    return "yes" if fits else "no"
