"""LG-FedAvg (Liang et al. 2020): representations of one's own below a shared output layer.

fedjaxsim run --algorithm experiments/gallery/lg_fedavg.py:lg_fedavg --model mlp --data digits
"""

import fedjaxsim as fjs


@fjs.reads(fjs.optimizers.LEARNING_RATE, fjs.optimizers.SERVER_LEARNING_RATE)
def lg_fedavg(task: fjs.Task) -> fjs.Algorithm:
    """Run FedPer the other way round: all layers but the output layer stay with their client.

    Args:
      task: model and loss; the model names its output layer.
    """
    if task.output_layer is None:
        raise ValueError("lg_fedavg needs a model that names its output layer, such as mlp")
    output = f"{task.output_layer}/"
    return fjs.fedper(task, head=lambda path: not path.startswith(output))
