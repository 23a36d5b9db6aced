"""The options of `tune` that its command and its work share."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Question:
    """Options that a tuning depends on, besides the settings of a run.

    Attributes:
      wrt: Positive hyperparameters to tune, as learning-rate,clip; without it, the error lists
        those of the algorithm.
      seeds: S, runs per point, whose mean is minimized; all points share the seeds.
      steps: Most points to try besides the start.
      metric: Smooth metric to minimize; by default loss.
      public_data: Data to tune on instead of the run's; they are read without protection.
    """

    wrt: tuple[str, ...] = ()
    seeds: int = 4
    steps: int = 20
    metric: str | None = None
    public_data: str | None = None
