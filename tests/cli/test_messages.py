"""Words of refusals and help: the one place where whole sentences are compared."""

import contextlib
import pickle
import sys

import jax
import pytest

from fedjaxsim import checks
from fedjaxsim.checks import Name, SettingError, SettingWarning
from fedjaxsim.cli.messages import in_flags, refuse
from fedjaxsim.data.files import in_file
from fedjaxsim.report import progress
from fedjaxsim.runs import build


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("run --sampling-rate 1.5", "sampling-rate must lie in (0, 1], got 1.5"),
        ("run --lam inf", "lam must be finite and at least 0, got inf"),
        ("run --epsilon 1 --noise-multiplier 1", "epsilon and noise-multiplier exclude each other"),
        ("run --rounds 2.5", "rounds must be a whole number, as 1000000 or 1e6, got '2.5'"),
        (
            "run --lam abc",
            "lam must be a number or, in a file, a list of one per client, got 'abc'",
        ),
        ("run --mu 1", "mu has no effect with algorithm pmtl, only with fedprox"),
        ("run --lamm 1", "unknown setting 'lamm' (did you mean 'lam'?)"),
        ("resume r --lam 1", "lam is a setting of the run, which resume keeps"),
        ("evaluate r --lam 1", "lam is a setting of the run, which evaluate does not change"),
        ("sweep --lam 1,2 --name a --out s", "--name is a flag of run, not of sweep"),
        ("bench --device h100", "--device is a flag of plan, not of bench"),
        ("ls --quiet", "--quiet is a flag of other commands, not of ls"),
        ("run --quite", "unknown setting 'quite' (did you mean 'quiet'?)"),
        ("run --outputs 3", "outputs has no effect with loss softmax, only with MODULE:FACTORY"),
        ("run --overwrite false --out r", "--overwrite takes no value: leave out 'false'"),
        ("run --train-rows 0", "train-rows must be at least 1, got 0"),
        ("run --metric f1", "metric f1 needs metrics f1"),
        ("run --metrics F1", "got 'F1' (did you mean 'f1'?)"),
        ("run --logger wandbb --out r", "got 'wandbb' (did you mean 'wandb'?)"),
        ("sweep --seeds 2 --seed secret --out s", "seeds and seed secret exclude each other"),
        ("sweep --lam 1,2 --seed secret --out s", "seed secret is for a run to publish"),
        ("run --from a --out r", "a holds a tuning: give the directory of a run"),
        ("resume .", ". holds several runs: give one of them, as two"),
        ("run b.toml", "b.toml: seeds belongs on the command line, not in a file"),
        ("resume r --roundz 1", "unknown flag 'roundz' (did you mean 'rounds'?)"),
        ("run --algorithm", "--algorithm needs a value"),
        ("run --sampling fixed", "cohort must be given: "),
        ("run a.toml", "a.toml: unknown setting 'learning-rat' (did you mean 'learning-rate'?)"),
        ("run absent.toml", "no configuration file absent.toml"),
        ("run --drop a b", "no configuration file b"),
        ("run --data a.csv", "(did you mean 'csv:a.csv'?)"),
        ("run --devices 999", "devices must be all, or at most the 2 (cpu), got 999"),
        ("bench --devices none", "devices must be all or a positive number, got 'none'"),
        ("run --seeds 1e6 --out r", "seeds must be an integer in [1, 100000], got 1000000"),
        ("sweep --seeds 1e6 --out r", "seeds must be an integer in [1, 100000], got 1000000"),
        ("demo --seeds 1e6 --out r", "seeds must be an integer in [1, 100000], got 1000000"),
        ("run --overwrite", "overwrite has no effect without out"),
        ("run --name a", "name has no effect without out"),
        ("run --format pdf", "format has no effect without out"),
        ("run --profile a.toml/b", "profile must be a directory, got a.toml/b"),
        ("run --logger tracker:f --out r", "must take (settings, path), but takes (settings)"),
        ("run --metrics f1,, --out r", "metrics must be a list, as in a,b, got 'f1,,'"),
        ("run --logger= --out r", "logger must be a list, as in a,b, got ''"),
        ("sweep s.toml --out s", "s already holds a sweep without a search"),
        ("run --out a.toml", "out must be a directory, got a.toml"),
        ("sweep --seeds 2 --out a.toml/s", "out must be a directory, got a.toml"),
        ("tune --wrt lam --out a.toml", "out must be a directory, got a.toml"),
        ("run --out a", "a holds a tuning, and is no place for a run"),
        ("run --seeds 2 --out a", "a holds a tuning, and is no place for a folder of several"),
        ("compare absent", "no directory absent"),
        ("compare absent --over bytes", "over bytes is an axis of a figure: give --out FILE.png"),
        ("compare absent --over seconds --out a.tex", "over seconds is an axis of a figure"),
        ("compare absent --speed 1", "set the clock of --over seconds"),
        ("run --over bytes", "over has no effect without out"),
        ("compare absent --out a.gif", "out must end in .png, .pdf, .svg, .html, .tex or .csv"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_is_wrong_and_what_is_allowed(
    refused, tmp_path, monkeypatch, command, sentence
):
    (tmp_path / "a.toml").write_text("learning_rat = 1\n")
    (tmp_path / "tracker.py").write_text("def f(settings): pass\n")
    (tmp_path / "s").mkdir()
    (tmp_path / "s/sweep.toml").touch()
    (tmp_path / "s.toml").write_text("[search]\nseeds = [1]\nlam = [1, 2]\n[sweep]\nseed = [0]\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/path.json").touch()
    (tmp_path / "b.toml").write_text("seeds = 3\n")
    (tmp_path / "two").mkdir()
    (tmp_path / "two/config.toml").touch()
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert sentence in refused(command)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("sweep --lam 1,2 --data npz:absent.npz --out s", "checking the runs of s"),
        ("tune --wrt mu --out t", "checking the tuning"),
        ("plan --data npz:absent.npz", "reading npz:absent.npz"),
        ("audit --data npz:absent.npz", "reading npz:absent.npz"),
        ("bench --data npz:absent.npz", "reading npz:absent.npz"),
        ("data show --data npz:absent.npz", "reading npz:absent.npz"),
        ("run --data npz:absent.npz", "reading npz:absent.npz"),
        ("compare absent", "reading the runs"),
        (
            "privacy --epsilon 1e-9 --sampling-rate 0.1 --noise-multiplier 1 --delta 1e-5",
            "computing",
        ),
    ],
)
def test_what_may_take_long_is_said_unless_the_command_is_quiet(
    refused, monkeypatch, command, said
):
    every: list[str] = []

    @contextlib.contextmanager
    def doing(text, *, quiet=False):
        every.extend([] if quiet else [text])
        yield

    monkeypatch.setattr(progress, "doing", doing)
    monkeypatch.setattr(build, "doing", doing)
    refused(command)
    assert said in every[-1]
    starts = not command.startswith(("compare", "privacy", "data"))
    assert ("starting JAX" in every) == starts
    quiet = {"sweep": "--quiet", "tune": "--quiet", "run": "--quiet"}
    every.clear()
    refused(f"{command} {quiet.get(command.split()[0], '--json')}")
    assert every == []


def test_names_of_settings_and_parts_are_spelled_as_flags_and_nothing_else(tmp_path):
    parts = (Name("num_clients"), " of my_run, as ", Name("no_release()"), f" in {tmp_path}/a_b")
    error = SettingError(*parts)
    assert str(error) == f"num_clients of my_run, as no_release() in {tmp_path}/a_b"
    assert in_flags(error) == f"clients of my_run, as no-release in {tmp_path}/a_b"
    assert in_flags(ValueError("num_clients")) == "num_clients"
    warning = SettingWarning(Name('local_message="steps"'), " helps")
    assert (str(warning), in_flags(warning)) == (
        'local_message="steps" helps',
        "--local-message steps helps",
    )
    with pytest.raises(ValueError, match="batch_size") as raised, in_file("a_b.toml"):
        checks.positive(batch_size=0)
    said = "a_b.toml: batch-size must be positive and finite, got 0"
    assert in_flags(raised.value) == in_flags(pickle.loads(pickle.dumps(raised.value))) == said


def test_a_long_message_loses_its_end(capsys):
    words = [f"word-{k}" for k in range(100)]
    assert refuse(ValueError("\n".join(words))) == 2
    line = capsys.readouterr().err
    assert line.startswith("fedjaxsim: error: word-0 word-1 word-2")
    assert line.endswith(" …\n")
    assert 380 < len(line.removeprefix("fedjaxsim: error: ")) <= 401


def test_a_branch_on_a_traced_value_is_told_the_remedy(capsys):
    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        jax.jit(lambda x: 1 if x > 0 else 2)(1.0)
    assert refuse(raised.value) == 2
    assert "use jnp.where" in capsys.readouterr().err
