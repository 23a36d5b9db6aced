import math
from pathlib import Path

import pytest

from fedjaxsim.algorithms import SYSTEMS
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.runs.settings_files import combine, read_toml


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_keys_take_dashes_and_underscores_and_values_become_the_fields_types(tmp_path):
    settings = read_toml(
        written(
            tmp_path,
            """
            learning-rate = 1
            local_steps = 3
            epsilon = "inf"
            hidden = [32, 16]
            preprocess = "drop-constant, unit-rows"
            chunk-map = "scan"
            out = "results"
            quiet = true
            """,
        )
    )
    assert settings == {
        "learning_rate": 1.0,
        "local_steps": 3,
        "epsilon": math.inf,
        "hidden": (32, 16),
        "preprocess": ("drop-constant", "unit-rows"),
        "chunk_map": "scan",
        "out": Path("results"),
        "quiet": True,
    }
    assert isinstance(settings["learning_rate"], float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learnig-rate = 0.1", r"unknown key 'learnig-rate' \(did you mean 'learning-rate'\?\)"),
        ("zzz = 1", r"unknown key 'zzz'; known keys: data, clients, .*sampling-rate"),
        ("local-steps = 2\nlocal_steps = 3", "local-steps is given twice"),
        ("rounds = 2.5", "rounds must be a whole number, got 2.5"),
        ("rounds = true", "rounds must be a whole number, got True"),
        ("clip = '1'", "clip must be a number, got '1'"),
        ("hidden = [1.5]", r"hidden must be a list of int, got \[1.5\]"),
        (
            "algorithm = 'fedsgd'",
            f"algorithm must be one of {', '.join(SYSTEMS)}, or MODULE:FACTORY",
        ),
        ("rounds = ", "is not a TOML file"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_what_is_allowed(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=message) as caught:
        read_toml(path)
    assert str(caught.value).startswith(str(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no configuration file .*absent\.toml"):
        read_toml(tmp_path / "absent.toml")


def test_what_a_run_adds_to_its_configuration_is_not_read_back(tmp_path):
    path = written(tmp_path, "rounds = 3\n[versions]\njax = '1'\n[resolved]\ncapacity = 4\n")
    assert read_toml(path) == {"rounds": 3}


def test_a_flag_displaces_what_it_excludes_in_the_file():
    settings = {"noise_multiplier": 2.0, "local_epochs": 5, "rounds": 7}
    flags = RunConfig(epsilon=1.0, local_steps=3)
    assert combine(settings, flags) == RunConfig(rounds=7)
    assert combine(settings, RunConfig()) == RunConfig(**settings)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RunConfig(epsilon=1.0, noise_multiplier=2.0), "epsilon and noise-multiplier exclude"),
        (RunConfig(local_steps=1, local_epochs=2), "local-steps and local-epochs exclude"),
        (RunConfig(epsilon=0.0), r"epsilon must be positive .*, got 0.0"),
        (RunConfig(epsilon=math.nan), "epsilon must be positive .*, got nan"),
        (RunConfig(delta=1.0), r"delta must lie in \(0, 1\), got 1.0"),
        (RunConfig(rounds=0), "rounds must be at least 1, got 0"),
        (RunConfig(eval_every=0), "eval-every must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        config.validate()


def test_clipping_follows_from_what_was_asked():
    assert not RunConfig().clips
    assert not RunConfig(epsilon=math.inf).clips
    assert RunConfig(epsilon=2.0).clips
    assert RunConfig(noise_multiplier=0.0).clips


def test_the_settings_of_a_run_repeat_it(tmp_path):
    import tomli_w

    config = RunConfig(epsilon=math.inf, hidden=(8, 4), preprocess=("unit-rows",), seed=3)
    path = written(tmp_path, tomli_w.dumps(config.settings()))
    assert RunConfig(**read_toml(path)) == config
