"""Data and settings that are hardly meant: refused, or worth a warning."""

import sys

import numpy as np
import pytest

from fedjaxsim.cli import main
from fedjaxsim.cli import running as command

N = 60
OWN = """
import jax, jax.numpy as jnp, fedjaxsim as fjs

def more(shape, outputs):
    return fjs.Model(lambda key: jnp.zeros((3, outputs + 2)), lambda w, x: x @ w)

def counting(shape, outputs):
    init = lambda key: {"w": jnp.zeros((3, outputs)), "n": jnp.zeros((), jnp.int32)}
    return fjs.Model(init, lambda params, x: x @ params["w"])
"""
COLUMNS = "run --data csv:a.csv --client who --target"


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "silent", raising=False)
    (tmp_path / "silent.py").write_text(OWN)
    rows = (f"u{k % 4},{k},v{k},{k % 3},{('no', 'NA')[k % 2]}" for k in range(N))
    (tmp_path / "a.csv").write_text("\n".join(["who,number,name,class,answer", *rows]) + "\n")
    x, y, client = np.random.default_rng(0).normal(size=(N, 3)), np.arange(N) % 2, np.arange(N) % 4
    np.savez("good.npz", x=x, y=y, client=client)
    large = np.where(np.arange(N)[:, None] == 1, 1e300, x)
    np.savez("large.npz", x=large, y=y, client=client)
    np.savez("uneven.npz", x=np.sign(x) * [1, 2, 1e5], y=y, client=client)
    np.savez("two.npz", x=x, y=np.stack([y, y], 1), client=client)
    np.savez("hot.npz", x=x, y=np.eye(2, dtype=int)[y], client=client)
    np.savez("alone.npz", x=x, y=y)
    np.savez("ids.npz", x=x, y=y, client=np.stack([client, client], 1))
    np.savez("words.npz", x=x, y=y, client=client, split=np.array(["trian"] * N))
    (tmp_path / "a.toml").write_text("epsilon = 1\n[sweep]\nnoise-multiplier = [1, 2]\n")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (f"{COLUMNS} class --one-hot name --drop answer", "'name' has 60 values in 60 rows"),
        (f"{COLUMNS} number --drop name,answer", "holds 60 different whole numbers"),
        (f"{COLUMNS} name --drop answer", "labels have 60 values in 60 rows, too many for classes"),
        (f"{COLUMNS} class --drop number,name,answer", "no column is left for features"),
        ("run --sampling-rate 1e-9 --clients 6", "sampling-rate must be at least 0.0017"),
        ("run --data npz:good.npz --model silent:more", "outputs (b, 2) for b rows, got (3, 4)"),
        ("run --data npz:good.npz --model silent:counting", "floating parameters, got int32 at n"),
        ("run --data npz:large.npz", "fit into float32, got 1e+300"),
        ("run --data npz:two.npz", "one label y for each row, (n,), got shape (60, 2)"),
        ("run --data npz:hot.npz", "labels y (60, 2) are one-hot: give"),
        ("run --data npz:alone.npz", "alone.npz holds no client of its rows"),
        ("run --data npz:ids.npz", "got int64 (60, 2): 0, 0, 1, 1 …"),
        ("run --data npz:words.npz", "train, validation, test, got 'trian' in row 1"),
        ("sweep a.toml --out s", "epsilon and noise-multiplier exclude each other"),
        ("run --clients 1500", "clients must be at most 359, as each has 5 rows"),
    ],
)  # fmt: skip
def test_what_is_hardly_meant_is_refused(files, refused, flags, sentence):
    error = refused(flags)
    assert sentence in error
    assert len(error) <= 230


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        (f"{COLUMNS} answer --drop name,number", "'NA' counts as a class"),
        ("run --data npz:uneven.npz", "holds numbers up to 1e+05, so no learning rate suits"),
        ("run --data npz:good.npz", ""),
    ],
)
def test_what_may_be_meant_gives_a_warning(files, monkeypatch, capsys, flags, warns):
    monkeypatch.setattr(command, "_run", lambda *_, **options: 0)
    assert main(flags.split()) == 0
    error = capsys.readouterr().err
    assert warns in error
    assert error.count("\n") == bool(warns)
