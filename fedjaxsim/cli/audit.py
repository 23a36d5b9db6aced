"""`fedjaxsim audit`."""

from fedjaxsim.cli.flags import UNEVALUATED, Work, without
from fedjaxsim.cli.machines import Machines
from fedjaxsim.runs.settings import RunConfig


@without("audit_canaries", *UNEVALUATED)
def audit(
    *,
    settings: RunConfig,
    canaries: int = 100,
    runs: int = 20,
    json: bool = False,
    quiet: bool = False,
) -> Work:
    """Attack simulations with canaries; the exit code is 1 if that refutes the reported ε.

    Args:
      settings: The settings of each run.
      canaries: n, canaries beside the clients of each run.
      runs: Number of runs; time grows with it, and power with n times it.
      json: Print JSON instead of text.
      quiet: Print the result and errors only.
    """
    Machines().start()
    import dataclasses

    from fedjaxsim.audit import bounds
    from fedjaxsim.report.files import print_json
    from fedjaxsim.report.progress import Bar
    from fedjaxsim.runs.build import prepare

    experiment = prepare(settings)
    with Bar("audit", runs, quiet=quiet or json) as bar:
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

    def work() -> int:
        found = dataclasses.asdict(result) | {"refuted": result.refuted}
        print_json(found) if json else print(result)
        return int(result.refuted)

    return work
