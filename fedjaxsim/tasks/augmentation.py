"""Augmentation: random changes of examples in training."""

from collections.abc import Callable

import jax

from fedjaxsim.data.batch import Batch
from fedjaxsim.kernels import threefry
from fedjaxsim.tasks.task import Task

Augment = Callable[[jax.Array, dict[str, jax.Array]], dict[str, jax.Array]]
"""(key, fields of an example) -> its fields in this step."""


def augmented(task: Task, augment: Augment) -> Task:
    """Make a task whose examples are changed at random in training: cropped, flipped, noised.

    Evaluations read them as they are.

    Args:
      task: the task.
      augment: `(key, fields) -> fields` of one example, without the batch axis and with the same
        shapes; the key is of the example, the client, the round and the step.
    """

    def changed(batch: Batch) -> Batch:
        if batch.keys is None:
            return batch
        keys, own = jax.vmap(threefry.split)(batch.keys)  # random layers have others
        return batch._replace(fields=jax.vmap(augment)(keys, batch.fields), keys=own)

    def loss(params, batch):
        return task.loss(params, changed(batch))

    def track(params, moved, batch):
        assert task.track is not None
        return task.track(params, moved, changed(batch))

    def on_model(model):
        assert task.on_model is not None
        return augmented(task.on_model(model), augment)

    return task._replace(
        loss=loss,
        track=None if task.track is None else track,
        on_model=None if task.on_model is None else on_model,
        linear=None,
        layers=None,
    )
