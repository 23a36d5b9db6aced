"""Flags are composed of the parts that a command names, those of a user's own code, too."""

import os
import re
import subprocess
import sys

import pytest
from problems import HANGS

from fedjaxsim.cli import main

SMALL = [
    "--clients", "8", "--rounds", "4", "--eval-every", "2", "--local-steps", "2",
    "--sampling-rate", "1",
]  # fmt: skip
pytestmark = pytest.mark.usefixtures("mine")


def ask(*arguments: str) -> str:
    """The help that a new process shows, 80 columns wide, and on its last line what it imported."""
    script = (
        "import sys\nfrom fedjaxsim.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    print(*({'jax', 'numpy', 'flax'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=HANGS,
        env=os.environ | {"COLUMNS": "80"},
    )
    return done.stdout


# --- help -----------------------------------------------------------------------------------------


def test_help_fits_on_a_hundred_lines_imports_nothing_and_says_where_the_rest_is():
    *lines, imported = ask("run", "--help").splitlines()
    assert len(lines) <= 100
    assert imported == ""
    words = " ".join(" ".join(lines).split())
    assert "a part are shown once it is named, as by `run --algorithm pmtl --help`" in words
    assert "stage after the run are shown by `run --finetune mean --help`" in words
    assert "processes by `run --devices all --help`" in words
    assert not {"--lam", "--finetune-lam", "--coordinator"} & {*words.split()}


@pytest.mark.parametrize(
    ("named", "shown", "absent"),
    [
        ("--algorithm pmtl", "--lam --message --learning-rate", "--mu --rounds"),
        ("--algorithm fedprox", "--mu", "--lam --message"),
        ("--model mlp", "--hidden", "--lam --rounds"),
        ("--mechanism adaptive", "--target-quantile --noise-multiplier", "--lam"),
        ("--sampling passes", "--cohort --max-participations", "--sampling-rate"),
        ("--data csv", "--target --client --drop", "--alpha --rounds"),
        ("--partition dirichlet", "--alpha --clients", "--target"),
        ("--data synthetic --partition iid", "--offset-scale", "--alpha"),
        ("--algorithm pmtl --model mlp", "--lam --hidden", "--mu"),
        ("--finetune mean", "--finetune-lam --finetune-rounds", "--rounds"),
        ("--devices all", "--coordinator --cluster", "--rounds"),
        ("--algorithm mine:pfedme", "--inner-steps --inner-learning-rate --lam", "--mu --message"),
    ],
)
def test_help_shows_the_flags_of_the_parts_that_are_named(named, shown, absent, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["run", *named.split(), "--help"])
    assert stopped.value.code == 0
    found = {*re.findall(r"--[\w-]+", capsys.readouterr().out.partition(" options ")[2])}
    assert found >= {*shown.split()}
    assert not found & {*absent.split()}


def test_help_of_ones_own_part_has_its_words(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--algorithm", "mine:pfedme", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "θ is the proximal point of a client's loss at w." in shown
    assert "--inner-steps INT steps towards θ on every minibatch. (default: 3)" in shown
    assert "--lam FLOAT λ, the weight of the proximal term (default: 1.0)" in shown


# --- what nothing reads, and what cannot be -------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run --mu 1", "mu has no effect with algorithm pmtl, only with fedprox"),
        ("run --hidden 4", "hidden has no effect with model linear, only with mlp or gru or"),
        ("run --cohort 4", "cohort has no effect with sampling poisson, only with fixed or passes"),
        ("run --count-noise 1", "count-noise has no effect with mechanism gaussian, only with ada"),
        ("run --target y", "target has no effect with data digits, only with csv or parquet"),
        ("run --partition iid --alpha 1", "alpha has no effect with partition iid, only with dir"),
        ("run --data synthetic --alpha 1", "alpha has no effect on data with clients of their own"),
        ("tune --mu 1", "mu has no effect with algorithm pmtl, only with fedprox"),
        ("plan --mu 1", "mu has no effect with algorithm pmtl, only with fedprox"),
        ("audit --mu 1", "mu has no effect with algorithm pmtl, only with fedprox"),
        ("data show --rounds 3", "rounds has no effect on data"),
        ("run --algorithm mine:apfl --lam 1", "lam has no effect with algorithm mine:apfl, only"),
        ("run --lamm 1", "Unrecognized options: --lamm, 1; perhaps you meant --lam; see"),
        ("run --algorithm", "Missing value for argument '--algorithm'"),
        ("run --data", "Missing value for argument '--data'"),
        ("data show --partition", "Missing value for argument '--partition'"),
        ("run --algorithm=", "algorithm must be one of pmtl, .*, or MODULE:FACTORY .*, got ''"),
        ("run --sampling fixed", "Missing from fedjaxsim run: --cohort INT"),
        ("run --clip -1", "clip_norm must be positive .*, got -1"),
        ("run --processes a --algorithm mine:apfl", "processes must be a whole number, .*'a'"),
        ("run a.toml", "a.toml: sweep is for `fedjaxsim sweep`"),
        ("run b.toml", "b.toml: inner-steps must be a whole number, got 2.5"),
        ("run c.toml", "c.toml: lam must be a number, got 'x'"),
        ("sweep d.toml --out s", r"d.toml: value 2 of inner-steps in \[sweep\] must be a whole nu"),
        ("sweep e.toml --out s", r"initial_mixing must lie in \[0, 1\], got 2.0"),
        ("sweep f.toml --out s", r"no run reads what is swept: lam has no effect with algorithm"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_it(arguments, message, mine, capsys):
    pfedme, sweep = 'algorithm = "mine:pfedme"\n', "rounds = 1\n[sweep]\n"
    apfl = 'algorithm = "mine:apfl"\n'
    for name, text in (
        ("a", sweep + "lam = [1, 2]"),
        ("b", pfedme + "inner-steps = 2.5"),
        ("c", pfedme + "lam = 'x'"),
        ("d", pfedme + sweep + "inner-steps = [1, 2.5]"),
        ("e", apfl + sweep + "initial-mixing = [0.1, 2]"),
        ("f", apfl + sweep + "lam = [0.1, 2]"),
    ):
        (mine / f"{name}.toml").write_text(text)
    before = sorted(mine.rglob("*.*"))
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("fedjaxsim: error: ")
    assert re.search(message, error), error
    assert error.count("\n") == 1
    assert [path for path in sorted(mine.rglob("*.*")) if path.suffix != ".pyc"] == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("mine:pfedme --inner-learning-rate -1", "inner_learning_rate must be finite and at leas"),
        ("mine:pfedme --inner-learning-rate inf", "inner_learning_rate must be finite .*, got inf"),
        ("mine:pfedme --inner-learning-rate abc", "inner-learning-rate must be a number, got 'ab"),
        ("mine:pfedme --lam nan", "lam must be finite and at least 0, got nan"),
        ("mine:pfedme --inner-steps 2.5", "inner-steps must be a whole number, .*, got '2.5'"),
        ("mine:pfedme --inner-steps two", "inner-steps must be a whole number, .*, got 'two'"),
        ("mine:pfedme --mixing-learning-rate 1", "Unrecognized options: --mixing-learning-rate"),
        ("mine:apfl --initial-mixing 1.5", r"initial_mixing must lie in \[0, 1\], got 1.5"),
        ("mine:apfl --initial-mixing -0.1", r"initial_mixing must lie in \[0, 1\], got -0.1"),
        ("mine:apfl --inner-steps 2", "Unrecognized options: --inner-steps"),
        ("mine:forgets", "mine:forgets: hyperparameter '.*' is not declared .*reads declares them"),
        ("mine:clashes", "'rounds' is a setting of every run: no part may have one so called"),
    ],
)
def test_bad_values_of_ones_own_part_are_refused(given, message, mine, capsys):
    assert main(["run", *SMALL, "--algorithm", *given.split(), "--out", "r"]) == 2
    error = capsys.readouterr().err
    assert re.match(f"fedjaxsim: error: .*{message}", error), error
    assert error.count("\n") == 1
    assert not (mine / "r").exists()
