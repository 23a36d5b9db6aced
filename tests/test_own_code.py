"""Whose code a part runs, however it is wrapped."""

import cProfile
import dataclasses
import functools
import importlib
import sys
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.problems import classification

import fedjaxsim as fjs
from fedjaxsim.engine.program import mechanism_of_run
from fedjaxsim.factories import maker
from fedjaxsim.kernels.primitives import ImpureError
from fedjaxsim.own_code import code_run_by, is_own, own_modules

POPULATION, TASK = classification([3] * 20)
BASE = fjs.gaussian()
ADD: Any = BASE.add
WHOLE = fjs.full_participation().for_clients(20)


@functools.wraps(BASE.add)
def mine(*args):
    return args


class Mine:
    def add(self, *args):
        return args

    def __call__(self, *args):
        return args


class Named:
    """Says that it is JAX's."""

    def __call__(self, *args):
        return args


Named.__module__ = "jax"


WRAPPED = {
    "wraps": mine,
    "jitted": jax.jit(mine),
    "partial": functools.partial(ADD, mine),
    "method": Mine().add,
    "object": Mine(),
    "named": Named(),
    "named globals": eval("lambda *args: args", {"__name__": "jax"}),
    "globals of no module": eval("lambda *args: args", {"__name__": "jax.mine"}),
    "keyword": functools.partial(ADD, key=mine),
    "mapping": functools.partial(ADD, key=MappingProxyType({"mine": mine})),
    "set": functools.partial(ADD, key=frozenset([mine])),
    "layers": nn.Sequential([nn.Dense(2), mine]).apply,
    "renamed": eval("lambda *args: args", {"__name__": ""}),
}


@pytest.mark.parametrize("function", WRAPPED.values(), ids=WRAPPED)
def test_code_is_its_authors_however_it_is_wrapped(function):
    made = getattr(function, "__code__", None)
    expected = ["<string>"] if made and made.co_filename == "<string>" else [__name__]
    assert own_modules(function) == expected
    assert own_modules(BASE._replace(add=function)) == expected
    # A function of the package that holds it, as in `mechanism_of_run`.
    assert own_modules(mechanism_of_run(BASE._replace(add=function), ())) == expected


@dataclasses.dataclass(frozen=True)
class Applied:
    """Says that it wraps a function of the package."""

    rate: float

    def __call__(self, *args):
        return args


def test_the_author_and_the_maker_of_a_function_follow_from_one_rule():
    by_hand = Applied(0.1)
    assert is_own(functools.update_wrapper(lambda *args: args, ADD))
    for function in (
        mine, jax.jit(mine), functools.partial(jax.jit(mine), 1), Mine().add, Mine(), by_hand,
        jax.jit(functools.partial(mine, 1)),
    ):  # fmt: skip
        assert is_own(function)
    for function in (ADD, jax.jit(ADD), functools.partial(ADD, mine), jax.jit(jnp.add)):
        assert not is_own(function)  # whatever it is given
    assert maker(functools.partial(jax.jit(Mine().add), 1)) == "Mine.add"
    assert maker(by_hand) == "Applied"


def test_the_package_and_libraries_are_nobodys():
    assert own_modules((BASE, fjs.poisson(0.1), fjs.pmtl(TASK), optax.adam(0.1), jnp.sum)) == []


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plain:
    values: Any


class Pair(NamedTuple):
    first: Any
    second: Any


def test_classes_of_fields_alone_run_no_code_where_they_are_taken_apart():
    module = nn.Dense(2).init(jax.random.key(0), jnp.zeros(3))
    state = {"a": [Plain(jnp.zeros(2)), Pair(module, None)], "b": optax.adam(0.1).init(module)}
    leaves, structure = jax.tree.flatten(state)
    assert code_run_by(functools.partial(jax.tree.unflatten, structure, leaves)) is None
    assert code_run_by(functools.partial(jax.tree.leaves, state)) is None
    assert str(code_run_by(Mine())).startswith("Mine.__call__ (")


def test_a_profiler_goes_on_after_code_is_watched():
    def later():
        pass

    with cProfile.Profile() as profiler:
        assert str(code_run_by(Mine())).startswith("Mine.__call__ (")
        later()
    assert later.__code__ in [entry.code for entry in profiler.getstats()]


_TYPED = """
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Typed:
    values: Any
    def __post_init__(self):
        pass
@dataclasses.dataclass(frozen=True)
class Plain:
    values: Any
class Pair(NamedTuple):
    first: Any
class Node:
    pass
jax.tree_util.register_pytree_node(Node, lambda node: ((0,), ()), lambda *_: Node())
"""


@pytest.mark.parametrize("file", ["<stdin>", "<string>", "<python-input-3>", "<ipython-input-1-a>"])
def test_code_that_is_typed_has_an_author(file):
    names = {"jax": jax, "dataclasses": dataclasses, "NamedTuple": NamedTuple, "Any": Any}
    names["__name__"] = "__main__"
    exec(compile(_TYPED, file, "exec"), names)
    assert str(code_run_by(functools.partial(names["Typed"], 0))).startswith(
        "Typed.__post_init__ ("
    )
    node = functools.partial(jax.tree.leaves, names["Node"]())
    assert f"<lambda> ({file}:" in str(code_run_by(node))
    for generated in ("Plain", "Pair"):
        assert code_run_by(functools.partial(names[generated], 0)) is None


@pytest.mark.parametrize("name", ["code", "statistics"])
def test_a_users_file_may_have_the_name_of_a_module_of_python(name, tmp_path, monkeypatch):
    (tmp_path / f"{name}.py").write_text(
        "class Part:\n    def add(self, *args): return args\ndef add(*args): return args\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, module)  # which puts Python's back
    for part in (module.add, module.Part(), jax.jit(module.add), BASE._replace(add=module.add)):
        assert own_modules(part) == [name]
    # A function outlasts its module.
    monkeypatch.delitem(sys.modules, name)
    assert own_modules(module.add) == [name]


def simulation(**parts):
    return fjs.Simulation(fjs.fedavg(TASK), POPULATION, **parts)


def test_a_wrapped_mechanism_keeps_its_assumption_and_its_checks():
    mechanism = BASE._replace(add=mine)
    sim = simulation(sampling=fjs.full_participation(), mechanism=mechanism)
    assert any(sentence.startswith(f"The mechanism of {__name__}") for sentence in sim.public)
    with pytest.raises(ValueError, match="add must return an accumulator"):
        sim.init(0, sim.hyperparameters(clip=1.0))


def test_a_wrapped_sampler_is_asked_for_cohorts():
    sampling = fjs.poisson(0.05)
    sampler = sampling.for_clients(20)

    @functools.wraps(sampler.draw)
    def everybody(*args):
        return WHOLE.draw(*args)

    liar = sampler._replace(draw=everybody)
    for_clients = functools.wraps(sampling.for_clients)(lambda m: liar)
    sim = simulation(sampling=sampling._replace(for_clients=for_clients))
    with pytest.raises(ValueError, match="does not draw as its scheme 'poisson' says"):
        sim.init(0, sim.hyperparameters())


def test_a_generator_of_minibatches_is_code_of_a_client():
    fields = {name: values[:40] for name, values in POPULATION.fields.items()}

    def generate(key, row, size):
        shift = rng.normal() if draws else 0.0
        return {name: jnp.stack([value] * size) for name, value in row.items()} | {
            "x": jax.random.normal(key, (size, *row["x"].shape)) + shift
        }

    stream = fjs.Population.from_flat(fields, [2] * 20, generate=generate)
    parts: Any = {"minibatches": fjs.Minibatches(2, steps=1), "mechanism": BASE}
    rng, draws = np.random.default_rng(0), False
    sim = fjs.Simulation(fjs.fedavg(TASK), stream, fjs.full_participation(), **parts)
    [sentence] = [text for text in sim.public if text.startswith("Functions of")]
    assert __name__ in sentence
    assert sentence in sim.program.assumed
    draws = True
    with pytest.raises(ImpureError, match="gives other numbers each time it is traced"):
        fjs.Simulation(fjs.fedavg(TASK), stream, fjs.full_participation(), **parts).init(
            0, sim.hyperparameters(clip=1.0, noise_multiplier=1.0)
        )
