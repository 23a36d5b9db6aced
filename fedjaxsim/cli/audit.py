"""`fedjaxsim audit`."""

from fedjaxsim.cli.flags import UNEVALUATED, Work, without
from fedjaxsim.cli.machines import Machines
from fedjaxsim.runs.settings import RunConfig


@without("audit_canaries", *UNEVALUATED)
def audit(
    *,
    settings: RunConfig,
    canaries: int | None = None,
    runs: int = 20,
    confidence: float = 0.99,
    json: bool = False,
    quiet: bool = False,
) -> Work:
    """Attack simulations with canaries; the exit code is 1 if that refutes the reported ε.

    Args:
      settings: The settings of each run.
      canaries: n, clients of each run that are canaries; half of the possible number by default.
      runs: Number of runs; time grows with it, and power with n times it.
      confidence: Least probability that a sound simulation is not refuted.
      json: Print JSON instead of text.
      quiet: Print the result and errors only.
    """
    Machines().start()
    from fedjaxsim.audit import canaries as attack
    from fedjaxsim.report.files import print_json
    from fedjaxsim.report.progress import Bar
    from fedjaxsim.runs.build import prepare

    experiment = prepare(settings)
    with Bar("audit", runs, quiet=quiet or json) as bar:
        result = attack.audit(
            experiment.simulation,
            experiment.hparams,
            settings.rounds,
            canaries=canaries,
            runs=runs,
            confidence=confidence,
            delta=experiment.delta,
            seed=settings.seed,
            on_run=lambda done, _: bar.show(done, ""),
        )

    def work() -> int:
        print_json(result.to_json()) if json else print(result)
        return int(result.violated)

    return work
