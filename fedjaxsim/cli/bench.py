"""`fedjaxsim bench`."""

from fedjaxsim.cli.devices import LocalDevices
from fedjaxsim.cli.flags import Quiet, Work
from fedjaxsim.factories import Count
from fedjaxsim.runs.settings import RunConfig

_MEDIANS = {
    "compile_seconds": "compile s", "evaluation_seconds": "evaluation s", "rounds_mb": "MB",
}  # fmt: skip


def bench(
    *,
    settings: RunConfig,
    repeats: Count = 5,
    json: bool = False,
    quiet: Quiet = False,
    devices: LocalDevices,
) -> Work:
    """Measure the speed and memory of a run.

    Args:
      repeats: Measurements.
      json: Print JSON, with all numbers and the machine, instead of a table.
    """
    quiet = quiet or json
    devices.start(quiet=quiet, exact=True)
    from fedjaxsim.bench.measure import Spread, machine, measure
    from fedjaxsim.cli.printing import print_json, print_rows
    from fedjaxsim.report.progress import doing, number
    from fedjaxsim.runs.build import prepare_with_progress

    experiment = prepare_with_progress(settings, quiet=quiet)

    def work() -> None:
        with doing(f"measuring {experiment.title}", quiet=quiet):
            measured = measure(experiment, repeats)
        if json:
            print_json({"machine": machine(), "settings": settings.settings(), **measured})
            return
        speed = Spread(measured["rounds_per_second"], *measured["rounds_per_second_range"])
        row = [experiment.title, str(speed), *(number(measured[of]) for of in _MEDIANS)]
        print_rows(["run", "rounds/s", *_MEDIANS.values()], [row])

    return work
