"""The options of a tuning besides those of a run, without JAX, so that help starts fast."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Question:
    """Options that a tuning depends on, besides the settings of a run.

    Attributes:
      wrt: Positive hyperparameters to tune, as learning-rate,clip; without it, the error lists
        those of the algorithm.
      seeds: S, runs per point, whose mean is minimized; all points share the seeds.
      steps: Most points to try besides the start.
      rule: Optimizer of optax that proposes the steps.
      metric: Smooth metric to minimize; by default loss.
      public_data: Data to tune on instead of the run's; they are read without protection.
    """

    wrt: tuple[str, ...] = ()
    seeds: int = 4
    steps: int = 20
    rule: Literal["adam", "lion"] = "adam"
    metric: str | None = None
    public_data: str | None = None
