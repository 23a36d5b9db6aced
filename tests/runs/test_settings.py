import math
from pathlib import Path

import pytest
from support.refusals import check_refusals

from fedjaxsim.cli.program import parse
from fedjaxsim.runs.settings import displaced, readers, run_config
from fedjaxsim.runs.settings_files import RECORDS, read_toml


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
            model = "mlp"
            epsilon = "inf"
            hidden = [32, 16]
            preprocess = "drop-constant, unit-rows"
            chunk-map = "scan"
            streamed = true
            """,
        )
    )
    assert settings.given() == {
        "learning_rate": 1.0,
        "local_steps": 3,
        "model": "mlp",
        "epsilon": math.inf,
        "hidden": (32, 16),
        "preprocess": ("drop-constant", "unit-rows"),
        "chunk_map": "scan",
        "streamed": True,
    }
    assert isinstance(settings.get("learning_rate"), float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "learnig-rate = 0.1",
            "'learnig-rate'.*'learning-rate'",
        ),
        ("zzz = 1", "'zzz'$"),
        ("quiet = true", "quiet belongs on the command line"),
        (
            "lam = 1\nalgorithm = 'fedavg'",
            "lam .*fedavg.*pmtl",
        ),
        ("local-steps = 2\nlocal_steps = 3", "local-steps"),
        ("rounds = 2.5", "rounds"),
        ("rounds = true", "rounds"),
        ("clip = '1'", "clip"),
        ("model = 'mlp'\nhidden = [1.5]", "hidden"),
        (
            "algorithm = 'fedsgd'",
            "algorithm must be .*'feddyn'.* or MODULE:FACTORY, got 'fedsgd'",
        ),
        ("rounds = ", "TOML"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_what_is_allowed(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=message) as caught:
        read_toml(path)
    assert str(caught.value).startswith(str(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.toml"):
        read_toml(tmp_path / "absent.toml")


def test_what_a_run_adds_to_its_configuration_is_not_read_back(tmp_path):
    path = written(tmp_path, "rounds = 3\n[versions]\njax = '1'\n[resolved]\ncapacity = 4\n")
    assert read_toml(path) == run_config(rounds=3)
    # A setting of the same name would not be read back either.
    assert not {*RECORDS} & {*readers(), *run_config().settings()}


def test_a_flag_displaces_what_it_excludes_in_the_file(tmp_path):
    settings = {"noise_multiplier": 2.0, "local_epochs": 5, "rounds": 7}
    assert displaced(settings, {"epsilon": 1.0, "local_steps": 3}) == {"rounds": 7}
    assert displaced(settings, {}) == settings
    path = written(tmp_path, "noise-multiplier = 2\nlocal-epochs = 5\nrounds = 7")
    flags = ["--epsilon", "1", "--local-steps", "3"]
    for words, expected in (
        (flags, run_config(rounds=7, epsilon=1.0, local_steps=3)),
        ([], run_config(**settings)),
    ):
        command = parse(["run", str(path), *words])
        assert command.settings == expected


def test_settings_with_changes_may_have_other_parts():
    config = run_config(lam=0.5, clip=2.0, noise_multiplier=1.0, rounds=7)
    assert config.replace(rounds=8, epsilon=math.inf, noise_multiplier=None) == run_config(
        lam=0.5, clip=2.0, rounds=8, epsilon=math.inf
    )
    # Settings that the other algorithm does not read are left out.
    assert config.replace(algorithm="fedprox", mu=0.3) == run_config(
        algorithm="fedprox", mu=0.3, clip=2.0, noise_multiplier=1.0, rounds=7
    )
    with pytest.raises(ValueError, match="mu"):
        config.replace(mu=0.3)


def test_a_sampling_rate_is_a_setting_like_any_other(tmp_path):
    import tomli_w

    config = run_config(sampling_rate=0.7)
    assert config.given() == {"sampling_rate": 0.7}
    assert config.values.keys() == run_config().values.keys()
    assert config.replace(lam=0.3).get("sampling_rate") == 0.7
    assert config.replace(sampling="fixed", cohort=3).given().keys() == {"sampling", "cohort"}
    assert read_toml(written(tmp_path, tomli_w.dumps(config.settings()))) == config
    assert run_config().get("sampling_rate") is None  # it follows from the number of clients


def test_settings_that_cannot_be_are_refused():
    check_refusals(
        lambda settings: run_config(**dict(settings)),
        {
            (("epsilon", 1.0), ("noise_multiplier", 2.0)): "epsilon and noise-multiplier exclude",
            (("local_steps", 1), ("local_epochs", 2)): "local-steps and local-epochs exclude",
            (("epsilon", 0.0),): "epsilon must be positive",
            (("epsilon", math.nan),): "epsilon must be positive",
            (("delta", 0.0),): "delta must lie in",
            (("delta", 1.0),): "delta must lie in",
            (("rounds", 0),): "rounds must be at least 1, got 0",
            (("eval_every", 0),): "eval-every must be at least 1",
            (("held_out_clients", 1.0),): "held-out-clients must lie in",
            (("passes", 2),): "passes need local-steps",
            (("weights", "rows"), ("noise_multiplier", 1.0)): "rows with noise need max-weight",
            (("max_weight", 9.0),): "max-weight has no effect with weights equal",
            (("evaluation_largest", 2.0),): "no effect without evaluate-privately",
            (("evaluate_privately", 0.0),): "evaluate-privately must be at least",
            (("noise_schedule", "linear"), ("epsilon", 1.0)): "noise-schedule .*'linear'",
            (("noise_schedule", "geometric:1e-9"), ("epsilon", 1.0)): r"1e\+06",
            (("noise_schedule", "power:3"), ("noise_multiplier", 1.2e-6)): "power:3 gives",
            (("algorithm", "ifca"), ("clusters", 10**9)): "clusters must be at most 10000",
            (("sampling", "groups"),): "groups must be given",
            (("mechanism", "gram"),): "mechanism .*'gram'",
            (("sampling", "shuffled"),): "sampling .*'shuffled'",
            (("algorithm", "ifca(k=5)"),): r"\(did you mean 'ifca'\?\) or MODULE:FACTORY, got",
        },
    )


def test_clipping_follows_from_what_was_asked():
    assert not run_config().clips
    assert not run_config(epsilon=math.inf).clips
    assert run_config(epsilon=2.0).clips
    assert run_config(noise_multiplier=0.0).clips
    # A norm that is given is not ignored, unless ε = inf says so.
    assert run_config(clip=0.5).clips
    assert run_config(algorithm="fedavg", clip=1e-4).clips
    assert not run_config(clip=0.5, epsilon=math.inf).clips


def test_the_settings_of_a_run_repeat_it(tmp_path):
    import tomli_w

    config = run_config(
        epsilon=math.inf, model="mlp", hidden=(8, 4), preprocess=("unit-rows",), seed=3
    )
    path = written(tmp_path, tomli_w.dumps(config.settings()))
    assert read_toml(path) == config
