"""A module given to the wrong function is refused, and the error names the right one."""

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import pytest
from flax import nnx

import fedjaxsim as fjs
from fedjaxsim.models.model import require_model

models: Any = fjs.models
OF_LINEN = nn.Dense(3)


@functools.cache
def of_nnx():
    return nnx.Linear(5, 3, rngs=nnx.Rngs(0))


@functools.cache
def of_equinox():
    return eqx.nn.Linear(5, 3, key=jax.random.key(0))


@pytest.mark.parametrize(
    ("module", "reader"),
    [
        (lambda: OF_LINEN, "fjs.models.from_flax("),
        (of_nnx, "fjs.models.from_nnx(lambda rngs"),
        (of_equinox, "fjs.models.from_equinox(lambda key"),
        (lambda: lambda params, x: x, "fjs.Model(init, apply)"),
    ],
)
def test_what_is_no_model_is_refused_with_what_makes_one(module, reader):
    with pytest.raises(ValueError, match="softmax needs a Model") as error:
        require_model("softmax needs", module())
    assert reader in str(error.value)


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("an instance of a flax.linen module", lambda: models.from_flax(nn.Dense, (5,))),
        ("fjs.models.from_nnx(", lambda: models.from_flax(of_nnx(), (5,))),
        ("lambda rngs: nnx.Linear(64, 10, rngs=rngs), got a Linear",
         lambda: models.from_nnx(of_nnx())),
        ("got a Dense", lambda: models.from_nnx(OF_LINEN)),
        ("lambda key: eqx.nn.MLP(", lambda: models.from_equinox(of_equinox())),
        ("input_shape must be", lambda: models.from_flax(OF_LINEN, 5)),
        ("input_shape must be", lambda: models.linear(5, 3)),
        ("input_shape must be", lambda: models.cnn(784, 3)),
        ("hidden must be", lambda: models.mlp((5,), 3, 8)),
        ("hidden must be", lambda: models.gru((5,), 3, 7, 8)),
    ],
)  # fmt: skip
def test_arguments_of_models_say_what_they_must_be(words, make):
    with pytest.raises(ValueError, match=r"needs|must|from_nnx") as error:
        make()
    assert words in str(error.value)
    assert len(str(error.value)) < 200
