"""The table of images and the transformer with adapters: rows, shapes and numbers of parameters."""

import csv
import math
import pickle
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

FOLDER = Path(__file__).parent
SCRIPTS = FOLDER / "cifar"


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_generated_images_follow_from_their_seed_and_have_ten_equal_classes(script):
    cifar = script("cifar")
    first, again, other = (cifar.generated(200, seed) for seed in (3, 3, 4))
    for name, shape, kind in (("x", (200, 32, 32, 3), np.uint8), ("y", (200,), np.int32)):
        assert (first[name].shape, first[name].dtype) == (shape, kind)
        np.testing.assert_array_equal(first[name], again[name])
    assert (first["x"] != other["x"]).mean() > 0.9
    np.testing.assert_array_equal(np.bincount(first["y"]), 20)
    patterns = cifar._patterns(3, np.random.default_rng(0))
    np.testing.assert_allclose(patterns.mean((1, 2, 3)), 0, atol=1e-12)
    np.testing.assert_allclose(patterns.var((1, 2, 3)), 1)
    # Nothing but waves of at most three periods along each axis.
    spectrum = np.abs(np.fft.fft2(patterns, axes=(1, 2)))
    assert spectrum[:, 4:-3].max() < 1e-9
    assert spectrum[:, :, 4:-3].max() < 1e-9


def test_files_of_cifar_10_hold_planes_of_colours(script, tmp_path):
    cifar, planes = script("cifar"), np.arange(3 * 32 * 32) % 256
    for place, name in enumerate(cifar.BATCHES):
        batch = {b"data": planes.astype(np.uint8)[None], b"labels": [place]}
        (tmp_path / name).write_bytes(pickle.dumps(batch))
    rows = cifar.read(tmp_path)
    np.testing.assert_array_equal(rows["y"], range(6))
    assert rows["x"].shape == (6, 32, 32, 3)
    # Of plane 2 (blue), row 5, column 7.
    assert rows["x"][0, 5, 7, 2] == (2 * 1024 + 5 * 32 + 7) % 256


def test_resnet_8_has_its_papers_layers(script):
    cifar = script("cifar")
    params = jax.eval_shape(cifar.resnet8((32, 32, 3), 10).init, jax.random.key(0))
    channels = ((3, 16), (16, 16), (16, 16), (16, 32), (32, 32), (32, 64), (64, 64))
    convolutions = sum(9 * a * b + 2 * b for a, b in channels)
    skips = sum(a * b + 2 * b for a, b in ((16, 32), (32, 64)))
    assert size(params) == convolutions + skips + 650
    # With a stride of 2 it is flax's, with either convolution.
    layer, theirs = cifar._Convolution(16, stride=2), nn.Conv(16, (3, 3), 2, 1, use_bias=False)
    native = cifar._Convolution(16, stride=2, native=True)
    norm = {"scale": jnp.linspace(1, 2, 16), "bias": jnp.linspace(-1, 1, 16)}

    @jax.jit
    def both(kernel, x):
        weights = {"params": {"kernel": kernel, "GroupNorm_0": norm}}
        ours = jnp.stack([convolution.apply(weights, x) for convolution in (layer, native)])
        z = nn.GroupNorm(8).apply({"params": norm}, theirs.apply({"params": {"kernel": kernel}}, x))
        return ours, jnp.broadcast_to(jnp.asarray(z), ours.shape)

    rng = np.random.default_rng(0)
    kernel, x = (rng.normal(size=s).astype(np.float32) for s in ((3, 3, 8, 16), (2, 8, 8, 8)))
    np.testing.assert_allclose(*both(kernel, x), atol=1e-4)


def test_the_small_table_has_the_numbers_of_its_file(script):
    small, page = script("small"), (FOLDER / "large-models.md").read_text(encoding="utf-8")
    with open(FOLDER / "results" / "cifar-small.csv", encoding="utf-8", newline="") as file:
        found = {
            (row["system"], float(row["epsilon"])): float(row["test_accuracy"])
            for row in csv.DictReader(file)
        }
    peers = {}
    with open(FOLDER / "results" / "cifar-pfllib.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = row["system"], row["protocol"]
            peers.setdefault(key, []).append(float(row["test_accuracy"]))
    peers = {key: np.mean(values) for key, values in peers.items()}
    columns = ("no noise", "by hand", "PFLlib's code", "ε = 8")
    heading = f"| test accuracy after {small.ROUNDS} rounds | {' | '.join(columns)} |"
    lines = page[page.index(heading) :].split("\n\n")[0].splitlines()[2:]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    shown = {}
    for name, *cells in table:
        plain = name, math.inf
        keys = plain, (f"{name} by hand", math.inf), (name, "ours"), (name, small.EPSILON)
        shown |= {key: float(cell) for key, cell in zip(keys, cells, strict=True) if cell}
    same = {key: value for key, value in peers.items() if key[1] == "ours"}
    assert shown == {key: round(value, 3) for key, value in (found | same).items()}
    assert {name for name, *_ in table} <= {*small.SYSTEMS}
    gaps = [abs(found[f"{name} by hand", math.inf] - found[name, math.inf])
            for name in small.BY_HAND]  # fmt: skip
    lost = [found[name, math.inf] - found[name, 8.0] for name in ("FedAvg", "FedPer")]
    words = " ".join(page.split())
    assert f"differ from ours by at most {max(gaps):.3f}" in words
    runs = ("FedPer", "ours"), ("FedAvg", "ours"), ("FedAvg", "theirs")
    apart = [peers[run] - found[run[0], math.inf] for run in runs]
    assert f"FedPer has {apart[0]:.3f} more than ours, FedAvg {-apart[1]:.3f} less" in words
    assert f"and {apart[2]:.3f} more by PFLlib's own protocol" in words
    assert ("only these three runs were done" in words) == (len(peers) == 3)
    assert f"FedAvg loses {lost[0]:.3f} and FedPer" in words
    assert f"all but the output layer, {lost[1]:.3f}." in words
    assert ("It shows that all eight systems" in words) == (len(table) == 9)
    shapes = jax.eval_shape(small.resnet8((8, 8, 1), 10, width=8).init, jax.random.key(0))
    assert f"{size(shapes):,} parameters, η = {small.RATE:g}, and C = {small.CLIP:g}" in words
    ratio = 45_000 * 2_000 / (2_750 * small.ROUNDS)
    assert 1_900 < ratio < 2_300, "1/2,000 of the table"


@pytest.mark.thorough
def test_clients_train_nothing_but_adapters(monkeypatch, script):
    monkeypatch.syspath_prepend(FOLDER / "lora")
    tokens, length, width, layers, rank = 32, 6, 16, 2, 3
    model = script("adapters").adapters((length,), tokens, width=width, layers=layers, rank=rank)
    params = model.init(jax.random.key(0))
    assert size(params) == layers * 2 * (2 * width * rank)
    dense = 4 * (width + 1) * width + (width + 1) * 4 * width + (4 * width + 1) * width
    others = tokens * width + length * width + 2 * width + (width + 1) * tokens
    assert size(model.frozen.weights) == layers * (dense + 4 * width) + others
    x = np.arange(2 * length).reshape(2, length) % tokens
    logits = model.apply(params, x)
    changed = model.apply(params, np.where(np.arange(length) < 4, x, 0))
    np.testing.assert_allclose(logits[:, :4], changed[:, :4], atol=1e-5)  # causal
    assert np.abs(logits[:, 4:] - changed[:, 4:]).max() > 1e-3
