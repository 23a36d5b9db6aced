"""`fedjaxsim audit`."""

from fedjaxsim.cli.devices import LocalDevices
from fedjaxsim.cli.flags import Json, Quiet, Work
from fedjaxsim.factories import Count
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.signals import end_on_signal


def audit(
    *,
    settings: RunConfig,
    canaries: Count = 100,
    runs: Count = 20,
    json: Json = False,
    quiet: Quiet = False,
) -> Work:
    """Attack simulations with canaries; the exit code is 1 if that refutes the reported ε.

    Args:
      canaries: n, canaries added to the clients of each run.
      runs: Number of runs; time grows with it, and power with n times it.
    """
    quiet = quiet or json
    LocalDevices().start(quiet=quiet)
    import dataclasses

    from fedjaxsim.audit import bounds
    from fedjaxsim.audit.canaries import with_canaries
    from fedjaxsim.cli.printing import print_json
    from fedjaxsim.report.progress import Bar
    from fedjaxsim.runs.build import prepare_with_progress

    experiment = prepare_with_progress(settings, quiet=quiet)
    with_canaries(experiment.simulation, experiment.hparams, canaries)  # as the audit will

    def work() -> int:
        with end_on_signal(), Bar("audit", runs, quiet=quiet) as bar:
            result = bounds.audit(
                experiment.simulation,
                experiment.hparams,
                settings.rounds,
                canaries=canaries,
                runs=runs,
                delta=experiment.delta,
                seed=settings.seed,
                on_run=lambda done, _: bar.show(done, ""),
            )
        report = dataclasses.asdict(result) | {"refuted": result.refuted}
        print_json(report) if json else print(result)
        return int(result.refuted)

    return work
