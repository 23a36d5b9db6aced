"""`fedjaxsim sweep`."""

from collections.abc import Callable
from pathlib import Path

from fedjaxsim.cli.machines import Machines


def sweep(
    config: Path,
    *,
    out: Path,
    data: str | None = None,
    overwrite: bool = False,
    select_privately: str | None = None,
    score_noise: float | None = None,
    score_largest: float = 1.0,
    quiet: bool = False,
    checkpoint_every: str | None = None,
    machines: Machines,
) -> Callable[[], int]:
    """Run a grid of settings as one program, and draw the best of each family.

    Args:
      config: Settings of a run and, in tables [sweep], the values to combine.
      out: Directory of the results; an interrupted sweep resumes in it.
      data: Source of the clients; wins over the file.
      overwrite: Replace the results in the directory.
      select_privately: Publish the best of a random number of runs: geometric:10 are 10 on average,
        with an ε of the whole.
      score_noise: z of the noise on the validation metric by which it is selected.
      score_largest: Public bound to which clients' metrics are clipped for that.
      quiet: Print the result and errors only.
      checkpoint_every: Rounds or time between checkpoints, as for `run`.
      machines: Devices.
    """
    machines.start()
    from fedjaxsim.cli.sweeping import prepare_sweep

    if (select_privately is None) != (score_noise is None):
        raise ValueError("select-privately needs score-noise, and score-noise select-privately")
    if select_privately is not None and score_noise is not None:
        from fedjaxsim.cli.selecting import prepare_selection

        return prepare_selection(
            config,
            out,
            data,
            spec=select_privately,
            noise=score_noise,
            largest=score_largest,
            overwrite=overwrite,
        )
    how = {"checkpoint_every": checkpoint_every, "overwrite": overwrite, "quiet": quiet}
    return machines.together(lambda: prepare_sweep(config, out, data, **how))
