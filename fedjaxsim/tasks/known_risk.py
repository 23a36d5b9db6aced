"""A task with a risk in closed form."""

import jax.numpy as jnp

from fedjaxsim.data.synthetic import feature_variances
from fedjaxsim.models.model import linear
from fedjaxsim.tasks.task import Task, squared


def known_regression(num_features: int) -> Task:
    """Linear regression with ½(prediction − y)², evaluated against the true parameters.

    For `regression_stream`: training sees minibatches of x (b, d) and y (b,); evaluation reads the
    clients' θ_i* and reports "excess_risk" = ‖θ − θ_i*‖²_Σ with Σ = diag(1, 1/2, …, 1/d), the
    paper's form (Bietti et al. 2022, section 6): twice the excess of the expected loss. (The
    authors' code also divides it by d.)

    Args:
      num_features: d. The model is {"kernel": (1, d)}, without bias, started at zero.
    """
    model = linear((num_features,), 1, bias=False)
    variances = feature_variances(num_features)

    def metrics(params, batch):
        error = params["kernel"][0] - batch.fields["theta"]
        return {"excess_risk": jnp.square(error) @ jnp.asarray(variances, error.dtype)}

    def check(fields):
        theta = fields.get("theta")
        if theta is None or theta.shape[1:] != (num_features,):
            raise ValueError(
                f"known_regression needs the field 'theta' of shape (N, {num_features}), got "
                + ", ".join(f"{name!r} {list(value.shape)}" for name, value in fields.items())
            )

    return squared(model)._replace(metrics=metrics, check=check, linear=None, curvature=None)
