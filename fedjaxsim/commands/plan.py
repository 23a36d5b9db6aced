"""The command `fedjaxsim plan`: tables of the memory of a run."""

from collections.abc import Callable

from fedjaxsim.data.ranges import MOST_ROWS
from fedjaxsim.report.files import print_json
from fedjaxsim.report.progress import bytes_text, print_rows
from fedjaxsim.runs import capacity
from fedjaxsim.runs.assemble import population_of
from fedjaxsim.runs.build import checked
from fedjaxsim.runs.capacity import Capacity
from fedjaxsim.runs.memory import this_machine
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.runs.sizes import sizes_of, sizes_without_data

_GB = 1e9
_WORDS = {
    "rows": "the examples",
    "ranges": "ranges and names of clients",
    "states": "personal states",
    "server": "the server's state",
    "process": "Python, JAX and compiled programs",
    "round": "working memory of a round",
    "evaluation": "working memory of an evaluation",
}
"""Parts of a need, in the order of the table's columns."""
_HEADINGS = ("placement", "memory", *_WORDS, "needs", "has", "fits")


def prepare_plan(
    config: RunConfig,
    shape: tuple[int, ...] | None = None,
    rows_per_client: int = 0,
    *,
    devices: int = 0,
    device_memory: float = 0.0,
    host_memory: float | None = None,
    json: bool,
) -> Callable[[], int]:
    """Plan; return a function that prints the tables.

    Args:
      config: settings of the run.
      shape: shape of one example, in place of data.
      rows_per_client: rows of each client, in place of data.
      devices: number of accelerators to plan for beside this machine; 0 for none.
      device_memory: memory of one accelerator, in GB.
      host_memory: memory of their host, in GB; by default this machine's.
      json: whether JSON is printed.

    Raises:
      FileNotFoundError, ValueError: for bad input.
    """
    if shape is None:
        population = population_of(config)
        checked(config, population=population)
        sizes = sizes_of(population)
    else:
        sizes = sizes_without_data(config, shape, config.get("clients"), rows_per_client)
    here = this_machine()
    machines = {"this machine": here}
    if devices:
        host = here.host if host_memory is None else int(_GB * host_memory)
        machines[f"{devices} accelerators of {device_memory:g} GB"] = here._replace(
            devices=devices, device=int(_GB * device_memory), host=host
        )
    plans = {name: capacity.plan(config, sizes, machine) for name, machine in machines.items()}

    def work() -> int:
        if json:
            print_json({name: plan.to_json() for name, plan in plans.items()})
            return 0
        first = plans["this machine"]
        print(
            f"{sizes.clients:,} clients with {sizes.num_rows:,} rows (int32 counts {MOST_ROWS:,}), "
            f"{first.parameters:,} personal numbers each; cohorts of up to {first.capacity:,}"
        )
        for name, plan in plans.items():
            print_rows(_HEADINGS, _table(plan), f"memory on {name}", left=2)
            print(_verdict(plan))
        print(
            f"on disk: {bytes_text(first.folder)} of rows as a folder, up to "
            f"{bytes_text(first.checkpoints)} of checkpoints; compiling takes more memory"
        )
        return 0

    return work


def _table(plan: Capacity) -> list[tuple[str, ...]]:
    rows = []
    for each in plan.placed:
        if each.impossible is not None:
            rows.append((each.name, each.impossible, *[""] * (len(_HEADINGS) - 3), "no"))
            continue
        for k, (memory, need, has) in enumerate(each.memories(plan.machine)):
            sizes = *(getattr(need, part) for part in _WORDS), need.peak, has
            fits = "yes" if need.peak <= has else "no"
            rows.append(("" if k else each.name, memory, *map(bytes_text, sizes), fits))
    return rows


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
