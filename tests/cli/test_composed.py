"""Flags are composed of the parts that a command names, those of a user's own code, too."""

import re

import pytest
from support.refusals import check_refusals, parsed

from fedjaxsim.cli import main
from fedjaxsim.cli.flags import USUAL
from fedjaxsim.runs.settings import readers
from fedjaxsim.runs.sweep_runs import read_sweep

SMALL = [
    "--clients", "8", "--rounds", "4", "--eval-every", "2", "--local-steps", "2",
    "--sampling-rate", "1",
]  # fmt: skip
pytestmark = pytest.mark.usefixtures("mine")


# --- help -----------------------------------------------------------------------------------------


def test_help_names_usual_flags_of_parts_and_says_where_their_meaning_is(capsys):
    assert main(["run", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "fedjaxsim run --algorithm NAME --help" in shown
    found = {*re.findall(r"--[\w-]+", shown)}
    assert {"--lam", "--learning-rate", "--clip", "--mu", "--sampling-rate", "--alpha"} <= found
    assert "--public" not in found


def test_help_names_settings_that_parts_have():
    assert USUAL.keys() <= readers().keys()


@pytest.mark.parametrize(
    ("named", "shown", "absent"),
    [
        ("--algorithm pmtl", "--lam --clip --sampling-rate --example-epsilon", "--mu --rounds"),
        ("--algorithm fedprox --sampling full", "--mu --clip", "--lam --sampling-rate"),
        ("--model mlp", "--hidden", "--lam --rounds"),
        ("--mechanism adaptive", "--target-quantile --noise-multiplier", "--lam"),
        ("--sampling fixed", "--cohort", "--sampling-rate"),
        ("--data csv", "--target --client --drop", "--alpha --rounds"),
        ("--partition dirichlet", "--alpha --clients", "--target"),
        ("--data synthetic --partition iid", "--offset-scale", "--alpha"),
        ("--algorithm pmtl --model mlp", "--lam --hidden", "--mu"),
        ("--algorithm mine:pfedme", "--inner-steps --inner-learning-rate --lam", "--mu --message"),
    ],
)
def test_help_shows_the_flags_of_the_parts_that_are_named(named, shown, absent, capsys):
    assert main(["run", *named.split(), "--help"]) == 0
    found = {*re.findall(r"--[\w-]+", capsys.readouterr().out.partition("\n")[2])}
    assert found >= {*shown.split()}
    assert not found & {*absent.split()}


def test_help_of_ones_own_part_has_its_words(capsys):
    assert main(["run", "--algorithm", "mine:pfedme", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "θ is the proximal point of a client's loss at w." in shown
    assert "--inner-steps INT steps towards θ on every minibatch. (default: 3)" in shown
    assert "--lam FLOAT λ, the weight of the proximal term (default: 1)" in shown
    assert "(default: no noise, unless noise-multiplier is given)" in shown
    assert "(default: inf)" not in shown


# --- what nothing reads, and what cannot be -------------------------------------------------------


def test_what_cannot_be_names_the_file_the_flag_and_the_part(mine, refused):
    pfedme, swept = 'algorithm = "mine:pfedme"\n', "rounds = 1\n[sweep]\n"
    apfl = 'algorithm = "mine:apfl"\n'
    for name, text in (
        ("a", swept + "lam = [1, 2]"),
        ("b", pfedme + "inner-steps = 2.5"),
        ("c", pfedme + "lam = 'x'"),
        ("d", pfedme + swept + "inner-steps = [1, 2.5]"),
        ("e", apfl + "trust-own-code = true\n" + swept + "initial-mixing = [0.1, 2]"),
        ("f", apfl + swept + "lam = [0.1, 2]"),
    ):
        (mine / f"{name}.toml").write_text(text)
    check_refusals(
        parsed,
        {
            "tune --mu 1": "mu has no effect.*fedprox",
            "run --algorithm mine:apfl --lam 1": "lam .*mine:apfl",
            "run --algorithm=": "algorithm .*MODULE:FACTORY",
            "run --processes a --algorithm mine:apfl": "processes must be a whole number",
            "run a.toml": "a.toml: .*sweep",
            "run b.toml": "b.toml: inner-steps must be",
            "run c.toml": "c.toml: lam must be",
        },
    )
    check_refusals(
        lambda name: read_sweep(mine / name),
        {
            "d.toml": "d.toml: .*inner-steps",
            "f.toml": "lam .*mine:apfl",
        },
    )
    assert "initial-mixing" in refused("sweep e.toml --out s")  # by its simulation


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("mine:pfedme --inner-learning-rate -1", "inner-learning-rate"),
        ("mine:pfedme --inner-learning-rate inf", "inner-learning-rate"),
        ("mine:pfedme --inner-learning-rate abc", "inner-learning-rate"),
        ("mine:pfedme --lam nan", "lam"),
        ("mine:pfedme --inner-steps 2.5", "inner-steps"),
        ("mine:pfedme --inner-steps two", "inner-steps"),
        ("mine:pfedme --mixing-learning-rate 1", "mixing-learning-rate"),
        ("mine:apfl --initial-mixing 1.5", "initial-mixing"),
        ("mine:apfl --initial-mixing -0.1", "initial-mixing"),
        ("mine:apfl --inner-steps 2", "inner-steps"),
        ("mine:forgets", "mine:forgets"),
        ("mine:clashes", "'rounds'"),
    ],
)
def test_bad_values_of_ones_own_part_are_refused(given, words, refused):
    assert words in refused(" ".join(["run", *SMALL, "--algorithm", given, "--out", "r"]))
