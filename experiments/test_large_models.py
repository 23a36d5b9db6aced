"""The table of images and the transformer with adapters: rows, shapes and numbers of parameters."""

import csv
import pickle
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjaxsim.report.results import difference

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


def accuracies(name, column):
    """Return the accuracies of each seed by system and a column, in a file of results."""
    found = {}
    with open(FOLDER / "results" / name, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            of_seeds = found.setdefault((row["system"], row[column]), {})
            of_seeds[int(row["seed"])] = float(row["test_accuracy"])
    return found


def test_the_small_table_has_the_numbers_of_its_files(script):
    small, page = script("small"), (FOLDER / "large-models.md").read_text(encoding="utf-8")
    ours, theirs = (
        accuracies("cifar-small.csv", "epsilon"),
        accuracies("cifar-pfllib.csv", "protocol"),
    )
    assert all({*of_seeds} == {*small.SEEDS} for of_seeds in (*ours.values(), *theirs.values()))
    columns = {
        "no noise": lambda name: ours[name, "inf"],
        "by hand": lambda name: ours.get((f"{name} by hand", "inf")),
        "PFLlib's code": lambda name: theirs[name, "ours"],
        "by its protocol": lambda name: theirs[name, "theirs"],
        "ε = 8": lambda name: ours.get((name, "8.0")),
    }
    heading = f"| test accuracy after {small.ROUNDS} rounds | {' | '.join(columns)} |"
    lines = page[page.index(heading) :].split("\n\n")[0].splitlines()[2:]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {name for name, *_ in table} == {*small.SYSTEMS}
    means = {key: np.mean([*of_seeds.values()]) for key, of_seeds in (ours | theirs).items()}
    for name, *cells in table:
        found = [of(name) for of in columns.values()]
        assert cells == [f"{np.mean([*of.values()]):.3f}" if of else "" for of in found]
    words = " ".join(page.split())
    gaps = [
        abs(ours[f"{name} by hand", "inf"][seed] - ours[name, "inf"][seed])
        for name in small.BY_HAND for seed in small.SEEDS
    ]  # fmt: skip
    assert f"differ from ours by at most {max(gaps):.3f} with one seed" in words
    gains = {}
    for name in small.SYSTEMS:
        found = theirs[name, "ours"], ours[name, "inf"]
        gains[name] = difference(*([of[seed] for seed in small.SEEDS] for of in found))[0]
    surely = gains.pop("Per-FedAvg")
    assert surely.mean < -surely.half
    assert f"Per-FedAvg has {-surely.mean:.3f} ± {surely.half:.3f} less than ours" in words
    assert all(abs(gain.mean) < gain.half for gain in gains.values())
    assert f"at most {max(abs(gain.mean) for gain in gains.values()):.3f} apart" in words
    shown = means["FedALA", "theirs"], means["FedALA", "inf"]
    assert "FedALA has {:.3f} instead of {:.3f}".format(*shown) in words
    lost = [means[name, "inf"] - means[name, "8.0"] for name in ("FedAvg", "FedPer")]
    assert f"FedAvg loses {lost[0]:.3f} and FedPer" in words
    assert f"all but the output layer, {lost[1]:.3f}." in words
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
