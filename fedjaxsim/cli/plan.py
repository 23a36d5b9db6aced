"""`fedjaxsim plan`."""

from typing import TYPE_CHECKING, Any, Literal

from fedjaxsim.cli.devices import LocalDevices
from fedjaxsim.cli.flags import Work
from fedjaxsim.factories import Count
from fedjaxsim.runs.settings import RunConfig

if TYPE_CHECKING:
    from fedjaxsim.runs.build import Experiment


def plan(
    *,
    settings: RunConfig,
    device: Literal["h100", "a100", "v5e"] | None = None,
    devices: Count | None = None,
    json: bool = False,
) -> Work:
    """Compile a run, without running it, and print the memory that it needs.

    It reads the data; `--data random` gives any number of rows of any shape.

    Args:
      device: Device to compile for, which need not be there; its compiler is an extra: cuda or tpu.
        By default this machine's.
      devices: Number of devices; by default all of this machine, or one of another kind.
      json: Print JSON, in bytes.
    """
    if settings.streamed and (devices or 1) > 1:
        raise ValueError(f"a streamed run takes one device, got devices {devices}")
    here = devices if device is None else None
    LocalDevices(str(here or "all")).start(quiet=json, exact=True)
    from fedjaxsim.cli.printing import print_json
    from fedjaxsim.report.progress import doing
    from fedjaxsim.runs.build import prepare_with_progress
    from fedjaxsim.runs.target import Target, plan_memory

    target = Target.here() if device is None else Target.named(device, devices or 1)
    experiment = prepare_with_progress(settings, quiet=json, check_memory=False)
    with doing(f"compiling {experiment.title}", quiet=json):
        memory_plan = plan_memory(experiment, target)

    return lambda: print_json(memory_plan) if json else _print(experiment, memory_plan)


_WORDS = {
    "rows": "rows", "states": "personal states", "server": "the server's state",
    "rounds": "a program of rounds", "evaluation": "a program of an evaluation",
    "compiler": "what its compiler adds",
    "host_states": "all personal states, on the host",
    "process": "this process: Python, JAX, programs, data",
    "needs": "needs", "peak": "at its peak, with mapped files", "has": "has",
}  # fmt: skip


def _print(experiment: "Experiment", memory_plan: dict[str, Any]) -> None:
    from fedjaxsim.cli.printing import print_rows
    from fedjaxsim.report.progress import bytes_text

    cohort = f"{memory_plan['clients']:,} clients, cohorts of up to {memory_plan['cohort']:,}"
    at_once = f"{memory_plan['chunk_size']} at once ({memory_plan['chunk_map']})"
    print(f"{experiment.title}: {cohort}, {at_once}")
    share = f"each of {memory_plan['devices']} " if memory_plan["devices"] > 1 else ""
    rows = [
        (words, bytes_text(memory_plan[name]))
        for name, words in _WORDS.items()
        if memory_plan[name]
    ]
    print_rows(("memory", f"{memory_plan['placement']}, {share}{memory_plan['device']}"), rows)
    if memory_plan["fits"] is not None:
        print("it fits" if memory_plan["fits"] else "it does not fit")
