"""ResNet-8 with BatchNorm in three libraries: one network, so one round of FedAvg, on digits."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fedjaxsim as fjs
from fedjaxsim.data import digits
from fedjaxsim.models import from_equinox, from_flax, from_nnx
from fedjaxsim.tasks import softmax

EPS, MOMENTUM = 1e-5, 0.9
STAGES = {"one": (4, 4, 1), "two": (4, 8, 2), "three": (8, 16, 2)}
"""Channels in and out, and the stride."""


class LinenNorm(nn.Module):
    train: bool

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(not self.train, momentum=MOMENTUM, epsilon=EPS, name="norm")(x)


class LinenBlock(nn.Module):
    width: int
    stride: int
    train: bool

    @nn.compact
    def __call__(self, x):
        def conv(name, size, stride):
            return nn.Conv(self.width, (size, size), stride, use_bias=False, name=name)

        y = nn.relu(LinenNorm(self.train, name="bn1")(conv("conv1", 3, self.stride)(x)))
        y = LinenNorm(self.train, name="bn2")(conv("conv2", 3, 1)(y))
        return nn.relu(y + conv("skip", 1, self.stride)(x))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(4, (3, 3), use_bias=False, name="stem")(x[..., None])
        x = nn.relu(LinenNorm(train, name="bn")(x))
        for name, (_, width, stride) in STAGES.items():
            x = LinenBlock(width, stride, train, name=name)(x)
        return nn.Dense(10, name="out")(x.mean((1, 2)))


class NnxNorm(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.BatchNorm(width, momentum=MOMENTUM, epsilon=EPS, rngs=rngs)

    def __call__(self, x):
        return self.norm(x)


class NnxBlock(nnx.Module):
    def __init__(self, inputs, width, stride, rngs):
        def conv(channels, size, stride):
            return nnx.Conv(channels, width, (size, size), stride, use_bias=False, rngs=rngs)

        self.conv1, self.conv2 = conv(inputs, 3, stride), conv(width, 3, 1)
        self.skip = conv(inputs, 1, stride)
        self.bn1, self.bn2 = NnxNorm(width, rngs), NnxNorm(width, rngs)

    def __call__(self, x):
        y = self.bn2(self.conv2(nnx.relu(self.bn1(self.conv1(x)))))
        return nnx.relu(y + self.skip(x))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.stem, self.bn = nnx.Conv(1, 4, (3, 3), use_bias=False, rngs=rngs), NnxNorm(4, rngs)
        for name, sizes in STAGES.items():
            setattr(self, name, NnxBlock(*sizes, rngs))
        self.out = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.bn(self.stem(x[..., None])))
        for name in STAGES:
            x = getattr(self, name)(x)
        return self.out(x.mean((1, 2)))


class EquinoxNorm(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self, width):
        self.norm = eqx.nn.BatchNorm(width, "batch", EPS, momentum=MOMENTUM, mode="batch")

    def __call__(self, x, state):
        return self.norm(x, state)


def same(x, size, stride):
    """Pad (c, h, w) as flax does: what an even number of rows lacks comes after them."""
    lacking = [max((-(-n // stride) - 1) * stride + size - n, 0) for n in x.shape[1:]]
    return jnp.pad(x, [(0, 0), *((n // 2, n - n // 2) for n in lacking)])


class EquinoxConv(eqx.Module):
    conv: eqx.nn.Conv2d
    size: int = eqx.field(static=True)
    stride: int = eqx.field(static=True)

    def __init__(self, inputs, width, size, stride, key):
        self.conv = eqx.nn.Conv2d(inputs, width, size, stride, use_bias=False, key=key)
        self.size, self.stride = size, stride

    def __call__(self, x):
        return self.conv(same(x, self.size, self.stride))


class EquinoxBlock(eqx.Module):
    conv1: EquinoxConv
    conv2: EquinoxConv
    skip: EquinoxConv
    bn1: EquinoxNorm
    bn2: EquinoxNorm

    def __init__(self, inputs, width, stride, key):
        self.conv1 = EquinoxConv(inputs, width, 3, stride, key)
        self.conv2 = EquinoxConv(width, width, 3, 1, key)
        self.skip = EquinoxConv(inputs, width, 1, stride, key)
        self.bn1, self.bn2 = EquinoxNorm(width), EquinoxNorm(width)

    def __call__(self, x, state):
        y, state = self.bn1(self.conv1(x), state)
        y, state = self.bn2(self.conv2(jax.nn.relu(y)), state)
        return jax.nn.relu(y + self.skip(x)), state


class EquinoxNet(eqx.Module):
    stem: EquinoxConv
    bn: EquinoxNorm
    one: EquinoxBlock
    two: EquinoxBlock
    three: EquinoxBlock
    out: eqx.nn.Linear

    def __init__(self, key):
        self.stem, self.bn = EquinoxConv(1, 4, 3, 1, key), EquinoxNorm(4)
        self.one, self.two, self.three = (EquinoxBlock(*size, key) for size in STAGES.values())
        self.out = eqx.nn.Linear(16, 10, key=key)

    def __call__(self, x, state):
        x, state = self.bn(self.stem(x[None]), state)
        x = jax.nn.relu(x)
        for block in (self.one, self.two, self.three):
            x, state = block(x, state)
        return self.out(x.mean((1, 2))), state


def to_equinox(linen, like):
    """Return the parameters of the linen network under the names and layouts of equinox."""

    def of(path, leaf):
        *names, last = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if "statistics" in names:
            return leaf
        names = [name for name in names if name != "conv"]
        scaled = names[-1] == "norm"
        found = linen
        for name in (*names, {"weight": "scale" if scaled else "kernel", "bias": "bias"}[last]):
            found = found[name]
        return (
            found.T
            if found.ndim == 2
            else found.transpose(3, 2, 0, 1)
            if found.ndim == 4
            else found
        )

    return jax.tree_util.tree_map_with_path(of, like)


def a_round(model, params):
    """Return the model after a round of FedAvg from these parameters."""
    images, labels = digits().values()
    clients = [{"x": images[k::4].reshape(-1, 8, 8), "y": labels[k::4]} for k in range(4)]
    population = fjs.Population.from_clients(clients)
    batches = fjs.Minibatches(16, steps=3)
    algorithm = fjs.fedavg(softmax(model._replace(init=lambda key: params), 10))
    sim = fjs.Simulation(algorithm, population, fjs.full_participation(), batches)
    hparams = sim.hyperparameters(learning_rate=0.05)
    return sim.round(sim.init(0, hparams), hparams)[0].shared.params


@pytest.mark.thorough
def test_a_round_of_fedavg_is_one_in_three_libraries():
    linen, nnx_net = from_flax(LinenNet(), (8, 8), "out"), from_nnx(NnxNet, "out")
    equinox = from_equinox(eqx.nn.make_with_state(EquinoxNet))
    params = linen.init(jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) > 4000
    after = a_round(linen, params)
    in_nnx = a_round(nnx_net, params)
    assert jax.tree.structure(after) == jax.tree.structure(in_nnx)
    for one, two in zip(jax.tree.leaves(after), jax.tree.leaves(in_nnx), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-5)
    in_equinox = a_round(equinox, to_equinox(params, equinox.init(jax.random.key(0))))
    expected = to_equinox(after, in_equinox)
    for one, two in zip(*map(jax.tree.leaves, (expected, in_equinox)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-5)
    # Equinox's running means start at 0, too.
    means = after["statistics"]["one"]["bn1"]["norm"]["mean"]
    kept = in_equinox["statistics"]["one"]["bn1"]["norm"]
    np.testing.assert_allclose(kept["batch_state_index"][0], means, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(kept["batch_counter"], 3)
