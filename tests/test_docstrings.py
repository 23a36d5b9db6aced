"""Examples in docstrings run, in one namespace: that of `Simulation` is first and makes `sim`."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedjaxsim as fjs

MODULES = fjs, fjs.privacy, fjs.data, fjs.models, fjs.tasks, fjs.gradients
LOADED = fjs.optimizers, fjs.shared_model


def examples():
    """The examples of all public names, by the object's name."""
    public = [getattr(module, name) for module in MODULES for name in module.__all__]
    public += [value for module in LOADED for value in vars(module).values() if callable(value)]
    finder, found = doctest.DocTestFinder(), {}
    for value in public:
        name = getattr(value, "__qualname__", "")
        if name and callable(value) and value.__module__.startswith("fedjaxsim"):
            for test in finder.find(value, name, module=False):
                if test.examples:
                    found[test.name] = test
    return found


def test_public_names_have_an_example():
    """All but types of one's own functions, and functions of files or the whole process."""
    public = {getattr(fjs, name): name for name in fjs.__all__ if callable(getattr(fjs, name))}
    without = {name for value, name in public.items() if ">>>" not in (value.__doc__ or "")}
    assert without == {
        *(
            "Client",
            "ClientData",
            "FinishedRun",
            "compare",
            "load_run",
            "sweep",
            "tune",
        ),
        *("keep_compiled_programs", "use_all_cores"),
    }


def test_examples_of_docstrings_say_what_happens():
    found, said = examples(), []
    assert len(found) >= 10
    names = {"fjs": fjs, "jax": jax, "jnp": jnp, "np": np, "optax": optax}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for name in sorted(found, key=lambda name: name != "Simulation"):
        found[name].globs = names
        runner.run(found[name], out=said.append, clear_globs=False)
    assert not said, "".join(said)
