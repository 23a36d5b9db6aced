import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w

from fedjaxsim.runs import sweeping
from fedjaxsim.runs.settings import run_config
from fedjaxsim.runs.sweep_runs import (
    Search,
    SweepOptions,
    expand_sweep,
    hyperparameters_of,
    read_plan,
    read_sweep,
)


def written(folder: Path, text: str) -> Path:
    path = folder / "sweep.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_setting_that_some_systems_do_not_read_is_named_with_them():
    base = {"schedule": "cosine", "local_optimizer": "momentum", "rounds": 7, "batch_size": 10}
    plan = expand_sweep(base, [{"algorithm": ["fedavg", "apfl", "scaffold", "ppsgd"]}])
    remark = "Settings without effect: schedule and local-optimizer with scaffold and ppsgd."
    assert plan.remark == remark
    assert not expand_sweep(base, [{"algorithm": ["fedavg", "apfl"]}]).remark


def test_a_table_is_a_product_whose_last_key_varies_fastest(tmp_path):
    plan = read_sweep(
        written(
            tmp_path,
            """
            rounds = 7
            memory = 3
            [sweep]
            learning-rate = [0.1, 1]
            algorithm = "fedavg"
            seed = [4, 5]
            """,
        )
    )
    assert plan.base == {"rounds": 7}
    assert plan.options == SweepOptions(memory=3.0)
    assert plan.keys == ("learning_rate", "algorithm", "seed")
    assert plan.runs == tuple(
        run_config(rounds=7, algorithm="fedavg", learning_rate=rate, seed=seed)
        for rate, seed in ((0.1, 4), (0.1, 5), (1.0, 4), (1.0, 5))
    )
    assert plan.swept[2] == {"learning_rate": 1.0, "algorithm": "fedavg", "seed": 4}


def test_tables_stand_side_by_side_and_a_run_of_several_is_one(tmp_path):
    plan = read_sweep(
        written(
            tmp_path,
            """
            lam = 0.5
            [[sweep]]
            algorithm = ["pmtl"]
            lam = [0.5, 0.1]
            [[sweep]]
            algorithm = ["fedprox"]
            mu = [0.1, 0.3]
            [[sweep]]
            algorithm = ["fedprox", "pmtl"]
            """,
        )
    )
    # The third table's runs are the second of the defaults μ = 0.1 and the first.
    assert [(run.algorithm, run.get("lam"), run.get("mu")) for run in plan.runs] == [
        ("pmtl", 0.5, None), ("pmtl", 0.1, None), ("fedprox", None, 0.1), ("fedprox", None, 0.3),
    ]  # fmt: skip
    assert plan.columns == ("algorithm", "lam", "mu")
    assert [tuple(plan.swept[run].values()) for run in range(4)] == [
        ("pmtl", 0.5, None), ("pmtl", 0.1, None), ("fedprox", None, 0.1), ("fedprox", None, 0.3),
    ]  # fmt: skip


def test_a_run_is_the_same_for_all_values_of_a_key_that_it_does_not_read(tmp_path):
    plan = read_sweep(
        written(
            tmp_path,
            """
            cohort = 4
            [sweep]
            algorithm = ["fedavg", "pmtl", "local"]
            lam = [0.1, 0.5]
            sampling = ["poisson", "fixed"]
            epsilon = [1]
            """,
        )
    )
    assert [tuple(plan.swept[run].values()) for run in range(len(plan.runs))] == [
        ("fedavg", None, "poisson", 1.0), ("fedavg", None, "fixed", 1.0),
        ("pmtl", 0.1, "poisson", 1.0), ("pmtl", 0.1, "fixed", 1.0),
        ("pmtl", 0.5, "poisson", 1.0), ("pmtl", 0.5, "fixed", 1.0),
        ("local", None, "poisson", None), ("local", None, "fixed", None),
    ]  # fmt: skip
    assert [run.get("cohort") for run in plan.runs] == [None, 4] * 4
    assert plan.families() == [[(0,)], [(1,)], [(2, 4)], [(3, 5)], [(6,)], [(7,)]]


def test_a_key_may_have_other_values_for_another_algorithm(tmp_path):
    plan = read_sweep(
        written(
            tmp_path,
            """
            loss = "squared"
            [[sweep]]
            algorithm = "finetune"
            penalty = ["mean", "kl"]
            [[sweep]]
            algorithm = "mpmtl"
            penalty = "group-sparse"
            """,
        )
    )
    assert [run.get("penalty") for run in plan.runs] == ["mean", "kl", "group-sparse"]


def test_other_data_leave_out_what_only_those_of_the_file_read(tmp_path):
    path = written(tmp_path, "data = 'digits'\nalpha = 0.3\nclients = 9\n[sweep]\nseed = [0, 1]")
    plan = read_sweep(path, {"data": "synthetic"})
    assert plan.base == {"data": "synthetic", "clients": 9}
    assert [(run.data, run.clients) for run in plan.runs] == [("synthetic", 9)] * 2


def test_epsilon_and_noise_displace_each_other(tmp_path):
    plan = read_sweep(
        written(
            tmp_path,
            """
            noise-multiplier = 2
            local-epochs = 3
            [[sweep]]
            epsilon = [1, inf]
            [[sweep]]
            noise_multiplier = [0]
            local_steps = [5]
            """,
        )
    )
    assert [(run.epsilon, run.noise_multiplier) for run in plan.runs] == [
        (1.0, None), (math.inf, None), (None, 0.0),
    ]  # fmt: skip
    assert [(run.local_epochs, run.local_steps) for run in plan.runs] == [
        (3, None), (3, None), (None, 5),
    ]  # fmt: skip
    assert plan.columns == ("target_epsilon", "noise_multiplier", "local_steps")
    assert plan.swept[1]["target_epsilon"] == math.inf


def test_lists_of_words_and_widths_are_strings_in_tables(tmp_path):
    path = written(
        tmp_path,
        "model = 'mlp'\n[sweep]\nhidden = [[64], [32, 16]]\n"
        "preprocess = ['unit-rows']\nrounds = [1]",
    )
    plan = read_sweep(path)
    assert [run.hidden for run in plan.runs] == [(64,), (32, 16)]
    assert plan.swept[1] == {"hidden": "32,16", "preprocess": "unit-rows", "rounds": 1}


def test_a_number_beside_words_is_a_word_and_beside_lists_of_clients_values_another_program():
    plan = expand_sweep(
        {}, [{"lam": (0.1, (0.1, 0.2), 0.3, (0.3, 0.2)), "eval_clients": (20, "all")}]
    )
    shown = [(row["lam"], row["eval_clients"]) for row in plan.swept[:3]]
    assert shown == [("0.1", "20"), ("0.1", "all"), ("0.1,0.2", "20")]
    assert plan.families() == [[(0, 4)], [(1, 5)], [(2, 6)], [(3, 7)]]
    many = tuple(k / 1000 for k in range(1000))
    of_clients = expand_sweep({}, [{"lam": (many, many[::-1])}])
    first, second = (of_clients.swept[run]["lam"] for run in (0, 1))
    assert first.startswith("0 to 0.999 (1000 clients, ")  # not a thousand numbers in each row
    assert first != second


def test_a_list_of_a_setting_of_several_values_is_one_value_and_a_list_of_lists_an_axis():
    table = {"data": "csv:x.csv", "target": "y", "client": "who", "loss": "squared"}
    table |= {"algorithm": ["pmtl", "fedavg"], "drop": ["a", "b"], "rounds": 1}
    plan = read_sweep(None, table | {"range": ["c=0:1", "d=0:1"]})
    assert plan.keys == ("algorithm",)
    values = [(each.get("drop"), each.get("range")) for each in plan.runs]
    assert values == [(("a", "b"), ("c=0:1", "d=0:1"))] * 2
    plan = read_sweep(None, table | {"range": [["c=0:1"], ["c=0:1", "d=0:1"]]})
    assert plan.keys == ("algorithm", "range")
    assert len(plan.runs) == 4


def test_groups_are_the_largest_that_differ_in_hyperparameters_alone():
    tables = [
        {
            "seed": (0, 1), "algorithm": ("pmtl", "fedavg"), "learning_rate": (0.1, 0.3),
            "epsilon": (1.0, math.inf),
        },
        {"noise_multiplier": (0.0, 1.0), "clip": (1.0, math.inf)},
    ]  # fmt: skip
    plan = expand_sweep({}, tables)
    families = plan.families()
    groups = [*itertools.chain(*families)]
    assert sorted(itertools.chain(*groups)) == list(range(20))

    def shared(run):
        return {k: v for k, v in run.values.items() if k not in hyperparameters_of(run)}

    for group in groups:
        assert all(shared(plan.runs[run]) == shared(plan.runs[group[0]]) for run in group)
    assert len({str(shared(plan.runs[group[0]])) for group in groups}) == len(groups) == 4
    assert [len(of_seeds) for of_seeds in families] == [2, 2]
    # PMTL with seed 0 also has the second table's runs, clipped or not.
    assert groups[0] == (0, 1, 2, 3, 16, 17, 18, 19)


def test_hyperparameters_that_are_estimated_from_rows_are_those_of_each_seed():
    base = {"data": "synthetic", "loss": "squared", "algorithm": "ditto", "pull": "rows"}
    seeds = [{"seed": (0, 1)}]
    assert expand_sweep(base, seeds).families() == [[(0,)], [(1,)]]
    for known in ({"lam": 2.0}, {"partition_seed": 5}):
        assert expand_sweep(base | known, seeds).families() == [[(0,), (1,)]]


def test_the_best_is_taken_over_the_learning_rate_or_the_keys_asked_for():
    one = {"learning_rate": (0.1, 1.0), "lam": (1.0,), "epsilon": (1.0,), "seed": (0, 1)}
    assert expand_sweep({}, [one]).best_over == ("learning_rate",)
    options = SweepOptions(best_over=("epsilon", "lam"))
    assert expand_sweep({}, [one], options).best_over == ("target_epsilon", "lam")
    del one["learning_rate"]
    assert expand_sweep({}, [one]).best_over == ()


def test_a_gigabyte_for_runs_has_a_thousand_million_bytes(monkeypatch):
    # Three runs of 530 MB fit into 2 · 10⁹ bytes, and four into 2 · 2³⁰.
    monkeypatch.setattr(sweeping, "bytes_per_run", lambda *_: 530_000_000)
    monkeypatch.setattr(sweeping, "varying", lambda _: None)
    batch = SimpleNamespace(with_runs=lambda *_: None)
    monkeypatch.setattr(sweeping, "SimulationBatch", lambda *_, **__: batch)
    plan: Any = SimpleNamespace(options=SweepOptions(memory=2.0))
    experiments: Any = dict.fromkeys(range(7), SimpleNamespace(hparams=None, simulation=None))
    chunks = sweeping._chunks(plan, [experiments], set(), None)
    assert [len(chunk.runs) for chunk in chunks] == [3, 2, 2]


def test_what_was_asked_for_can_be_asked_for_again(tmp_path):
    tables = [{"epsilon": (1.0, math.inf), "hidden": ((3, 4),)}, {"local_steps": (2,)}]
    options = SweepOptions(memory=1.5, best_over=("epsilon",))
    base = {"model": "mlp", "rounds": 3, "preprocess": ("unit-rows",)}
    plan = expand_sweep(base, tables, options)
    written_down = tomli_w.dumps({**plan.settings(), "resolved": {}, "versions": {"jax": "1"}})
    again = read_sweep(written(tmp_path, written_down))
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    # A flag takes the only axis of a table; `compare` reads what the sweep has written.
    text = "[[sweep]]\nlam = [0.1, 0.3]\n[[sweep]]\nlocal-steps = [2]\n"
    left = read_sweep(written(tmp_path, text), {"local_steps": 3})
    assert read_sweep(written(tmp_path, tomli_w.dumps(left.settings()))) == left


def test_the_fingerprint_follows_what_results_depend_on():
    table = {"learning_rate": (0.1, 0.3), "seed": (0,)}
    plan = expand_sweep({}, [table])
    same = expand_sweep({}, [table], SweepOptions(memory=9.0, best_over=()))
    assert same.fingerprint == plan.fingerprint
    others = [
        expand_sweep({"rounds": 99}, [table]),
        expand_sweep({}, [{**table, "seed": (1,)}]),
        expand_sweep({}, [{**table, "seed": (0, 1)}]),
        expand_sweep({}, [{"learning_rate": (0.3, 0.1), "seed": (0,)}]),
        expand_sweep({}, [{"learning_rate": (0.1, 0.3)}]),
    ]
    assert len({plan.fingerprint, *(other.fingerprint for other in others)}) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds = 3", r"\[sweep\]"),
        ("sweep = 3", r"\[\[sweep\]\].*3"),
        ("sweep = []", "sweep"),
        ("[sweep]", r"\[sweep\]"),
        ("[sweep]\nlamb = [1]", "'lamb'.*'lam'"),
        ("memori = 1\n[sweep]\nlam = 1", "'memori'.*'memory'"),
        ("[sweep]\nlam = []", r"lam in \[sweep\]"),
        ("[sweep]\nseed = [1, 2, 1]", r"seed in \[sweep\] lists 1 twice"),
        (
            "[sweep]\nseed = [0, 1.5]",
            "seed = 1.5: seed must be a whole number",
        ),
        (
            "[[sweep]]\nlam = 1\n[[sweep]]\nlam = [1, 'x']",
            "lam = x: lam must be a number",
        ),
        ("[sweep]\nlearning-rate = 1\nlearning_rate = 2", "learning-rate"),
        ("[sweep]\nepsilon = 1\nnoise-multiplier = 1", "epsilon and noise-multiplier"),
        ("[sweep]\nseed = 1\nepsilon = [1, -1]", "seed = 1, epsilon = -1: epsilon"),
        ("out = 'x'\n[sweep]\nseed = 1", "out belongs on the command line"),
        ("[sweep]\nquiet = [true]", "quiet"),
        ("[sweep]\nlam = 1\nmemory = 3", "memory"),
        ("memory = 0\n[sweep]\nlam = 1", "memory"),
        ("best-over = ['mu']\n[sweep]\nlam = 1", "best-over .*'mu'"),
        ("best-over = ['seed']\n[sweep]\nseed = 1", r"best-over .*\(none\).*seed"),
        ("best-over = ['lam', 'lam']\n[sweep]\nlam = 1", "best-over .*'lam'"),
        ("best-over = 3\n[sweep]\nlam = 1", "best-over"),
        (
            "[sweep]\nalgorithm = ['fedavg', 'fedprox']\nlam = [1]",
            "lam .*fedavg.*pmtl",
        ),
        (
            "lam = 2\n[[sweep]]\nalgorithm = 'fedavg'\nlam = 1\n[[sweep]]\nalgorithm = 'pmtl'",
            "lam .*fedavg",
        ),
        (
            "lam = 1\n[sweep]\nalgorithm = 'fedavg'",
            "lam .*fedavg",
        ),
        ("[sweep]\nalgorithm = 'fedsgd'", "algorithm .*'fedsgd'"),
        ("algorithm = 3\n[sweep]\nseed = 1", "algorithm .*3"),
        ("[sweep]\ndata = [3]", "data must be a name"),
        ("rounds = [1, 2]\n[sweep]\nlam = 1", r"rounds .* a list is for \[sweep\]"),
        ("algorithm = ['pmtl']\n[sweep]\nlam = 1", r"algorithm .* a list is for \[sweep\]"),
        ("logger = 'wandb'\n[sweep]\nlam = 1", "logger belongs on the command line"),
        ("[sweep", "TOML"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_the_place_and_what_is_allowed(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=message) as caught:
        read_sweep(path)
    assert str(caught.value).startswith(str(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.toml"):
        read_sweep(tmp_path / "absent.toml")


SEARCH = """
data = "digits"
[search]
points = 3
seeds = [1000]
learning-rate = [0.01, 1.0]
lam = [0.1, 10.0]
[sweep]
algorithm = ["local", "pmtl"]
epsilon = [1, inf]
seed = [0, 1]
"""


def search_of(tmp_path, text=SEARCH) -> Search:
    plan = read_plan(written(tmp_path, text))
    assert isinstance(plan, Search)
    return plan


def test_a_search_gives_each_combination_equally_many_points_evenly_spread(tmp_path):
    search = search_of(tmp_path)
    # Local reads neither ε nor λ. Halton's sequence halves in base 2 and thirds in base 3, here
    # on logarithmic scales.
    rates = [0.1, 0.0316, 0.316]
    lams = [0.1 * 100 ** (1 / 3), 0.1 * 100 ** (2 / 3), 0.1 * 100 ** (1 / 9)]
    found = [(dict(each.place), dict(each.point)) for each in search.candidates]
    assert found[:3] == [({"algorithm": "local"}, {"learning_rate": rate}) for rate in rates]
    assert [place.get("epsilon") for place, _ in found] == [None] * 3 + [1.0] * 3 + [math.inf] * 3
    for start in (3, 6):
        assert [point["learning_rate"] for _, point in found[start : start + 3]] == rates
        assert [point["lam"] for _, point in found[start : start + 3]] == [
            float(f"{lam:.3g}") for lam in lams
        ]
    tuning = search.tuning()
    assert {run.seed for run in tuning.runs} == {1000}
    assert len(tuning.runs) == 9
    assert {run.eval_every for run in tuning.runs} == {tuning.runs[0].rounds}


def test_the_chosen_points_run_with_the_seeds_of_the_sweep(tmp_path):
    search = search_of(tmp_path)
    picked = [search.candidates[place].columns for place in (1, 3, 8)]
    plan = search.chosen(picked, "validation accuracy")
    assert [(run.algorithm, run.seed) for run in plan.runs] == [
        ("local", 0), ("local", 1), ("pmtl", 0), ("pmtl", 1), ("pmtl", 0), ("pmtl", 1),
    ]  # fmt: skip
    assert [run.learning_rate for run in plan.runs[::2]] == [0.0316, 0.1, 0.316]
    assert "among 3 points, by the mean validation accuracy over seeds 1000" in plan.choice
    assert plan.best_over == ("learning_rate", "lam")
    with pytest.raises(ValueError, match="finite"):
        search.chosen([], "")


def test_a_combination_that_sets_more_keys_chooses_for_itself_alone(tmp_path):
    tables = '[[sweep]]\nalgorithm = "pmtl"\n[[sweep]]\nalgorithm = "pmtl"\nmessage = "update"\n'
    search = search_of(tmp_path, SEARCH.partition("[sweep]")[0] + tables)
    first, second = (search.candidates[place].columns for place in (0, 4))
    plan = search.chosen([first | {"message": None}, second], "accuracy")
    assert [run.learning_rate for run in plan.runs] == [0.1, 0.0316]


def test_a_grid_has_every_value_with_every_other_and_a_table_its_own(tmp_path):
    text = SEARCH.replace("points = 3\n", "").replace(
        'algorithm = ["local", "pmtl"]', 'algorithm = "pmtl"\nsearch = {lam = [0.5]}'
    )
    points = [dict(each.point) for each in search_of(tmp_path, text).candidates]
    assert points[:2] == [
        {"learning_rate": 0.01, "lam": 0.5}, {"learning_rate": 1.0, "lam": 0.5},
    ]  # fmt: skip
    assert len(points) == 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = [1000]", "seeds = [0]", "seed 0 both chooses"),
        ("seeds = [1000]\n", "", "needs seeds"),
        ("seeds = [1000]", "seeds = [5, 5]", "seeds in .search. lists 5 twice"),
        ("points = 3", "points = 0", "at least 1"),
        ("lam = [0.1, 10.0]", "lam = [10.0, 0.1]", "lam in .search. must be two positive numbers"),
        ("lam = [0.1, 10.0]", "rho = [0.1, 10.0]", "rho"),
    ],
)
def test_a_bad_search_is_refused(tmp_path, old, new, message):
    with pytest.raises(ValueError, match=message):
        _ = search_of(tmp_path, SEARCH.replace(old, new)).candidates
    with pytest.raises(ValueError, match=r"\[search\]"):
        read_sweep(written(tmp_path, SEARCH))
