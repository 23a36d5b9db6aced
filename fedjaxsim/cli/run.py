"""`fedjaxsim run`, `fedjaxsim resume` and `fedjaxsim export`."""

import dataclasses
from pathlib import Path

from fedjaxsim.cli.devices import Devices, LocalDevices
from fedjaxsim.cli.flags import Directory, Overwrite, Work
from fedjaxsim.factories import Count
from fedjaxsim.runs.output import RunOutput
from fedjaxsim.runs.settings import RunConfig


def run(
    *,
    settings: RunConfig,
    out: Path | None = None,
    overwrite: Overwrite = False,
    from_: Path | None = None,
    seeds: Count | None = None,
    name: str | None = None,
    tags: tuple[str, ...] = (),
    output: RunOutput,
    devices: Devices,
) -> Work:
    """Run one federated simulation.

    Args:
      out: Directory for the results; the same command goes on there, or shows them.
      from_: Start from the state of the run in this directory, on its data, settings and charges.
      seeds: Runs with seeds from --seed on, each in a directory in --out; then their mean.
      name: Name of the run in tables, in place of its directory's.
      tags: Words by which `fedjaxsim ls` finds it.
    """
    if name == "":
        raise ValueError("name must hold a character, got ''")
    labels = ({} if name is None else {"name": name}) | ({"tags": list(tags)} if tags else {})
    output.validate(out, overwrite=overwrite, name=name, tags=tags)
    if settings.streamed and (devices.count or 1) > 1:
        raise ValueError(f"a streamed run takes one device, got devices {devices.devices}")
    # In a process whose JAX has started, a streamed run takes the first of the devices.
    used = dataclasses.replace(devices, devices="1") if settings.streamed else devices
    used.start(quiet=output.quiet)
    from fedjaxsim.cli.process import in_all_processes
    from fedjaxsim.cli.running import seeds_work, work_of
    from fedjaxsim.runs.starting import prepare_run

    if seeds is not None:
        if out is None or from_ is not None or devices.processes or devices.cluster:
            raise ValueError("seeds needs out, and excludes from and several processes")
        return seeds_work(settings, out, seeds, output, overwrite=overwrite, labels=labels)

    def prepare() -> Work:
        how = {"overwrite": overwrite, "labels": labels}
        return work_of(prepare_run(settings, out, from_, output, **how), output)

    return in_all_processes(prepare, devices.count)


def resume(
    directory: Path,
    *,
    rounds: int | None = None,
    output: RunOutput,
    devices: Devices,
) -> Work:
    """Resume an interrupted or killed run, or extend a finished one.

    Args:
      directory: Directory of the run; its config.toml holds the settings.
      rounds: Total rounds, finished ones included; rounds beyond the plan spend more epsilon.
    """
    output.validate(directory)
    devices.start(quiet=output.quiet)
    from fedjaxsim.cli.process import in_all_processes
    from fedjaxsim.cli.running import work_of
    from fedjaxsim.runs.starting import prepare_resume

    return in_all_processes(
        lambda: work_of(prepare_resume(directory, rounds, output), output), devices.count
    )


def export(directory: Directory, *, out: Path | None = None) -> Work:
    """Write the part of a run that its guarantee covers: what may be handed on.

    Args:
      out: Directory of that part; by default public in the run's.
    """
    LocalDevices("1").start()
    from fedjaxsim.cli.printing import print_guarantee
    from fedjaxsim.report.progress import doing
    from fedjaxsim.runs.directory import CONFIG, GUARANTEE, RunDirectory
    from fedjaxsim.runs.execute import exportable, publish
    from fedjaxsim.runs.public import PUBLIC

    to = directory / PUBLIC if out is None else out
    if (to / CONFIG).exists():
        raise ValueError(f"out must be a new folder, but {to} is the directory of a run")
    with doing(f"reading {directory}"):
        state, report = exportable(directory)

    def work() -> None:
        publish(RunDirectory(directory), to, state, report)
        print_guarantee(report, to / GUARANTEE, explain=False)
        print(f"{to} may be handed on; all else in {directory} is private")

    return work
