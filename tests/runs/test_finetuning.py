"""The settings of a fine-tuning stage follow from the run's settings and a few flags."""

import dataclasses

import pytest

from fedjaxsim.cli import Run, parse
from fedjaxsim.runs.finetuning import Finetuning
from fedjaxsim.runs.settings import run_config

PRIVATE = run_config(
    data="synthetic", loss="squared", clients=9, algorithm="ditto", epsilon=2.0, delta=1e-4,
    accountant="pld", clip=0.3, sampling="fixed", cohort=3, lam=0.4, learning_rate=0.02,
    server_optimizer="adam", local_steps=3, passes=2, batch_size=7, schedule="cosine", seed=5,
)  # fmt: skip


def test_what_fine_tuning_reads_is_as_in_the_run_and_the_rest_as_if_nobody_had_said_it():
    stage = Finetuning("kl").settings_after(PRIVATE)
    expected = run_config(
        data="synthetic", loss="squared", clients=9, algorithm="finetune", penalty="kl", rounds=10,
        delta=1e-4, accountant="pld", sampling="full", lam=0.4, learning_rate=0.02,
        local_steps=3, batch_size=7, seed=5,
    )  # fmt: skip
    assert stage == expected
    assert (stage.parts["mechanism"].name, stage.sampler) == ("no-release", "full")


def test_the_models_and_the_clients_are_those_of_the_run():
    shape = {"model": "mlp", "hidden": (3, 4), "partition": "shards", "shards_per_client": 3}
    stage = Finetuning("mean").settings_after(run_config(algorithm="fedavg", **shape))
    assert stage == run_config(
        algorithm="finetune", penalty="mean", sampling="full", rounds=10, **shape
    )


def test_its_own_settings_win():
    own = Finetuning(
        "ewc", finetune_origin="global", finetune_clients_used="kept",
        finetune_rounds=2, finetune_local_epochs=4,
        finetune_batch_size=3, finetune_local_optimizer="adam", finetune_learning_rate=0.5,
        finetune_lam=0.0,
    )  # fmt: skip
    stage = own.settings_after(PRIVATE)
    given = {
        field.name.removeprefix("finetune_"): getattr(own, field.name)
        for field in dataclasses.fields(own)[1:]
    }
    assert {name: getattr(stage, name) for name in given} == given
    assert stage.local_steps is None  # its own epochs displace them
    # They are flags of those names, and the flags that it writes are read back.
    command = parse(["run", *own.flags()])
    assert isinstance(command, Run)
    assert command.finetuning == own


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--finetune-lam 1 --finetune-rounds 3", "finetune-lam"),
        ("--finetune vanilla --finetune-lam 1", "finetune-lam .*vanilla"),
        ("--finetune l2", "'l2'.*'--finetune'"),
        ("--finetune ewc --finetune-rounds 0", "fine-tuning: rounds"),
        (
            "--finetune ewc --finetune-local-steps 2 --finetune-local-epochs 3",
            "fine-tuning: local-steps and local-epochs",
        ),
        ("--penalty ewc", "penalty .*pmtl.*mpmtl or finetune"),
        ("--algorithm finetune --penalty vanilla --lam 2", "lam .*penalty"),
    ],
)
def test_what_has_no_effect_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(["run", *arguments.split()])
