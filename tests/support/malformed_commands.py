"""Commands that must be refused, and a program that gives each a process of its own.

    python tests/support/malformed_commands.py 600

tries 600 of them and lists those that are not refused in one line with exit code 2.
"""

import itertools
import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_SECONDS = 60
"""Ends a hang."""
_LONGEST = 250
"""Characters of an answer, with the name of the program and short paths."""
_NUMBERS: dict[str, str] = {
    "clients": "0 -1 2.5 abc 1e30 nan 1500 '' [] true",
    "rounds": "0 -1 1.5 1e10 abc '' nan",
    "eval-every": "0 -1 abc 1e300",
    "learning-rate": "-1 nan inf abc ''",
    "lam": "-1 nan inf abc",
    "sampling-rate": "0 -0.1 1.5 nan 1e-12 abc",
    "epsilon": "0 -1 nan abc 1e-300",
    "delta": "0 1 2 -1 nan abc",
    "clip": "-1 0 nan abc 1e30",
    "noise-multiplier": "-1 nan inf abc 1e300",
    "batch-size": "0 -1 1.5 abc 1e12",
    "local-steps": "0 -2 abc 1.5 1e12",
    "local-epochs": "0 -2 abc 1.5 1e12",
    "test-fraction": "-0.1 1 1.5 nan abc",
    "validation-fraction": "-0.1 1 1.5 nan abc",
    "held-out-clients": "1 -0.1 nan 0.999 abc",
    "seed": "-1 1e12 1.5 abc",
    "chunk-size": "0 -1 abc 1e12",
    "alpha": "0 -1 nan inf abc",
    "patience": "0 -1 abc 1",
    "audit-canaries": "0 -1 abc",
    "devices": "0 -1 999 abc",
    "server-learning-rate": "-1 nan abc",
}
_WORDS: dict[str, str] = {
    "algorithm": "bogus '' ifca(k=5) fedavgg 1 a:b :x os:getcwd",
    "model": "bogus mpl '' transformer a:b",
    "mechanism": "bogus '' wishart no-release every-row gaussian-gram",
    "sampling": "bogus '' fixed poison",
    "partition": "bogus column column: column:z '' iid:3",
    "data": "bogus '' csv: csv npz:absent.npz leaf:absent mat:absent.mat folder:absent images:a",
    "loss": "bogus '' squared logistic",
    "compute": "float16 ''",
    "schedule": "bogus cos",
    "noise-schedule": "power power:x geometric:0 bogus:1 power:nan power:1e9",
    "preprocess": "bogus drop-constant,bogus ,x",
    "chunk-map": "bogus pmap",
    "checkpoint-every": "0 abc 30s -1",
    "from": "absent . a.csv broken sweep",
    "out": "a.csv a.csv/b full",
}
_WITHOUT_EFFECT = (
    "--mu 1", "--hidden 8", "--algorithm local --epsilon 2", "--algorithm local --clip 1",
    "--algorithm fedavg --lam 1", "--algorithm mpmtl --model mlp", "--target y", "--split s",
    "--client who", "--algorithm finetune", "--epsilon 1 --noise-multiplier 1", "--cohort 3",
    "--local-steps 1 --local-epochs 1", "--model mlp --hidden 0", "--model mlp --hidden a",
    "--model mlp --hidden 1.5", "--streamed --devices 2", "--process 1", "--coordinator a:1",
    "--passes 2", "--mechanism plain-mean --epsilon 1", "--algorithm finetune --audit-canaries 3",
    "--epsilon 1 --clip inf", "--sampling fixed --cohort 999", "--sampling fixed --cohort 0",
    "--algorithm ifca --clusters 0", "--algorithm ifca --clusters -1", "--clients 6 --rounds",
    "--model gru", "--evaluate-privately 1",
    "--budget-epsilon 0", "--budget-epsilon nan",
)  # fmt: skip
_SPELLINGS = (
    "--cleints 6", "--learning_rat 1", "--noise 1", "--eps 1", "-x", "--rounds=",
    "--rounds --clients", "extra", "--seed 1 2", "--no-streamed 3", "--clip=", "--lam lam", "-r 1",
    "--", "--=1", "-- --rounds 1",
)  # fmt: skip
_ROWS = "who,a,b,y\n" + "".join(f"u{k % 4},{k},{k * k % 7},{k % 2}\n" for k in range(40))
_TABLES: dict[str, bytes] = {
    "empty": b"",
    "blank": b"\n\n\n",
    "header": b"who,a,b,y\n",
    "ragged": _ROWS.encode() + b"u1,2\n",
    "latin": _ROWS.replace("u1", "ü").encode("latin-1"),
    "quoted": _ROWS.encode() + b'u1,"2,3,0\n',
    "twice": _ROWS.replace("who,a,b", "who,a,a").encode(),
    "missing": _ROWS.replace("u1,1,1", "u1,,1").encode(),
    "text": _ROWS.replace(",4,", ",four,").encode(),
    "infinite": _ROWS.replace(",9,", ",inf,").encode(),
    "large": _ROWS.replace(",9,", ",1e300,").encode(),
    "constant": _ROWS.replace(",1\n", ",0\n").encode(),
    "nobody": _ROWS.replace("u1,", ",").encode(),
    "zeros": bytes(100),
    "garbage": bytes(range(256)) * 8,
    "semicolons": _ROWS.replace(",", ";").encode(),
    "gzip": b"\x1f\x8b" + bytes(30),
    "index": _ROWS.replace("who,a", ",a").encode(),
    "single": b"who,a,b,y\nu,1,2,0\n",
    "utf16": _ROWS.encode("utf-16"),
}
_COLUMNS = (
    "--client nobody --target y", "--client who --target z", "--client who", "--target y",
    "--client who --target who", "--client who --target y --one-hot z",
    "--client who --target y --drop a,b", "--client who --target y --drop who",
    "--client who --target y --split a", "--client who --target y --partition iid",
    "--client who --target y --x z", "--client who --target y --clients 3", "--client --target y",
    "--client who --target y --loss bogus",
    "--client who --target y --model cnn", "--client who --target y --preprocess invert",
    "--client who --target y --test-fraction 0.0", "--target y --partition column:z",
    "--target y --partition iid --split a", "--target y --partition iid --clients 99",
)  # fmt: skip
_ARRAYS: dict[str, Any] = {
    "scalar": np.float64(1),
    "none": np.ones((0, 3)),
    "short": np.arange(39),
    "no columns": np.ones((40, 0)),
    "nan": np.full(40, np.nan),
    "large": np.full(40, 1e300),
    "complex": np.full(40, 1j),
    "strings": np.array(["a"] * 40),
    "bytes": np.array([b"a"] * 40),
    "dates": np.zeros(40, "M8[D]"),
    "records": np.zeros(40, [("a", float)]),
    "far": 2**40 + np.arange(40),
    "matrix": np.ones((40, 2)),
    "objects": np.array([None] * 40),
    "negative": -1 - np.arange(40),
    "huge": np.full(40, 2**62),
}
_GOOD: dict[str, Any] = {"x": np.random.default_rng(0).normal(size=(40, 3)), "y": np.arange(40) % 2,
         "client": np.arange(40) // 10}  # fmt: skip
_FITTING = {("x", "strings"), ("x", "matrix"), ("x", "negative"), ("x", "huge"),
            ("client", "strings"), ("client", "far"), ("client", "negative"),
            ("client", "huge")}  # fmt: skip
"""Arrays that may be: names of clients, features, and text, which needs another model."""
_LEAF: dict[str, object] = {
    "list": [1, 2],
    "number": 3,
    "empty": {},
    "no lists": {"user_data": {}},
    "no users": {"users": [], "num_samples": [], "user_data": {}},
    "unknown": {"users": ["a"], "num_samples": [1], "user_data": {"b": {"x": [[1]], "y": [0]}}},
    "count": {"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[1]], "y": [0]}}},
    "ragged": {"users": ["a"], "num_samples": [2],
               "user_data": {"a": {"x": [[1, 2], [3]], "y": [0, 1]}}},
    "no y": {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1]]}}},
    "mixed": {"users": ["a"], "num_samples": [2],
              "user_data": {"a": {"x": [[1], ["b"]], "y": [0, 1]}}},
    "null": {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[None]], "y": [0]}}},
    "single": {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1]], "y": [0]}}},
}  # fmt: skip
_TOML = (
    "rounds = ", "rounds = 'a'", "rounds = 1.5", "rounds = true", "= 1", "[rounds]", "zzz = 1",
    "rounds = 1\nrounds = 2", "local-steps = 1\nlocal_steps = 2", "model = 1", "algorithm = []",
    "algorithm = 'bogus'", "clip = '1'", "a = " + "[" * 5000, "\x00", "[sweep]\n",
    "[sweep]\nlam = []", "[sweep]\nlam = [1, 1]", "[sweep]\nzzz = [1]", "[sweep]\nrounds = ['a']",
    "[sweep]\nlam = [nan]", "sweep = 1", "[[sweep]]", "epsilon = 1\n[sweep]\nnoise-multiplier=[1]",
    "best-over = ['lam']\n[sweep]\nmu = [1]", "[sweep]\nout = ['a']",
    "[sweep]\nlam = [1]\nseed=[-1]",
    "data = 1", "data = 'csv:a.csv'",
    "seed = -1\n[sweep]\nlam = [1]", "memory = 0\n[sweep]\nlam=[1]",
)  # fmt: skip
_OWN = """
import os
import jax, jax.numpy as jnp, fedjaxsim as fjs
NUMBER = 3
def fails(*args): raise RuntimeError("no")
def nothing(*args): return None
def text(*args): return "a"
def few(): return 1
def exits(*args): raise KeyError("a")
def wrong(shape, outputs):
    return fjs.Model(lambda key: jnp.zeros((64, outputs + 1)), lambda w, x: x.reshape(-1, 64) @ w)
def integers(shape, outputs):
    return fjs.Model(lambda key: jnp.zeros((64, outputs), int), lambda w, x: x.reshape(-1, 64) @ w)
def crooked(shape, outputs):
    return fjs.Model(lambda key: jnp.zeros((5, outputs)), lambda w, x: x @ w)
def flat(shape, outputs):
    return fjs.Model(lambda key: jnp.zeros(64), lambda w, x: x.reshape(-1, 64) @ w)
"""
_FACTORIES = "absent NUMBER fails nothing text few exits wrong integers crooked flat os __name__ ''"
_PLANS = (
    "--noise-multiplier 2 --rounds 5 --sampling-rate 0.1 --delta 1e-5",
    "--epsilon 1 --rounds 5 --sampling-rate 0.1 --delta 1e-5",
    "--epsilon 1 --noise-multiplier 2 --sampling-rate 0.1 --delta 1e-5",
    "--epsilon 1 --noise-multiplier 2 --rounds 5 --delta 1e-5",
)
_OF_PLANS: dict[str, str] = {
    "noise-multiplier": "-1 nan inf abc", "rounds": "0 -1 1.5 abc",
    "sampling-rate": "0 2 nan abc",
    "delta": "0 1 -1 nan abc", "epsilon": "0 -1 nan abc", "clients": "0 -1 abc",
    "adjacency": "bogus", "sampling": "bogus",
    "out": "t.bmp absent/t.png", "zzz": "1",
}  # fmt: skip
_RESULTS = (
    "compare", "compare absent", "compare sweep", "compare a.csv", "compare broken", "compare .",
    "compare broken --out c.bmp", "compare sweep broken --out r.html",
    "report broken", "predict broken",
    "resume", "resume absent", "resume sweep", "resume broken", "resume a.csv",
    "resume . --rounds 0", "resume broken --lam 1",
    "resume broken --quite", "resume broken --rounds abc", "run sweep", "run broken", "run .",
    "run sweep/sweep.toml", "run --from sweep --rounds 1", "sweep sweep --out s", "sweep",
    "sweep broken --out s",
    "sweep absent.toml --out s", "tune", "tune --out t --from broken", "tune sweep --out t",
    "tune --wrt lam --algorithm fedavg --out t", "tune --wrt rounds --out t", "plan broken",
    "plan --clients 0", "bench broken", "bench absent.json", "bench --compare a.csv", "bogus",
    "audit --runs 0", "audit --canaries -1", "audit --runs abc", "",
    "data", "data bogus", "data show --data csv:a.csv", "data convert --data digits",
    "data show --data absent", "data check --data npz:absent.npz", "demo --bogus", "privacy",
    "privacy bogus", "RUN", "run run", "--bogus", "help", "--data digits", "bench --devices none",
)  # fmt: skip


def make_files(folder: Path) -> None:
    """Write the files that the commands name."""
    (folder / "a.csv").write_text(_ROWS)
    for name, content in _TABLES.items():
        (folder / f"{name}.csv").write_bytes(content)
        (folder / f"{name}.parquet").write_bytes(content)
    for name, number in itertools.product(_GOOD, _ARRAYS):
        np.savez(folder / f"{name}-{number}.npz", **_GOOD | {name: _ARRAYS[number]})
    for name in _GOOD:
        np.savez(folder / f"no-{name}.npz", **{k: v for k, v in _GOOD.items() if k != name})
    for name, content in _LEAF.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    for number, text in enumerate(_TOML):
        (folder / f"{number}.toml").write_text(text)
    (folder / "malformed.py").write_text(_OWN)
    (folder / "unreadable.py").write_text("def f(:\n")
    for name in ("full", "sweep", "broken"):
        (folder / name).mkdir()
    (folder / "full/summary.json").write_text("{}")
    (folder / "full/config.toml").write_text("rounds = 1\n")
    (folder / "sweep/sweep.toml").write_text("[sweep]\nlam = [1]\n")
    for name in ("summary.json", "metrics.jsonl", "guarantee.json", "config.toml"):
        (folder / "broken" / name).write_text("{")


def _spelled(flags: dict[str, str]) -> Iterator[str]:
    for flag, values in flags.items():
        for value in values.split(" "):
            yield f"--{flag} {value}"


def _all() -> Iterator[tuple[str, str]]:
    """Yield the kind and the words of each command."""
    few = "--clients 6 --rounds 2 --local-steps 1"
    for flags in _spelled(_NUMBERS):
        given = "" if "local-" in flags else "--local-steps 1"
        yield "numbers", f"run --rounds 1 {given} {flags}"
    for flags in _spelled(_NUMBERS):
        algorithm = "fedprox --mu 1" if "lam" not in flags else "ditto"
        yield "numbers", f"run --algorithm {algorithm} --rounds 2 {flags}"
    for flags in _spelled(_WORDS):
        yield "words", f"run {few} {flags}"
    for command, flags in itertools.product(("run", "audit", "plan"), _WITHOUT_EFFECT):
        if (command, flags) != ("plan", "--algorithm finetune"):  # a later stage has a plan, too
            yield "without effect", f"{command} --rounds 1 {flags}"
    for command, flags in itertools.product(("run", "bench", "tune --out t"), _SPELLINGS):
        yield "spellings", f"{command} {flags}"
    for name, kind in itertools.product(_TABLES, ("csv", "parquet")):
        yield "tables", f"run --data {kind}:{name}.{kind} --client who --target y --rounds 1"
    for flags in _COLUMNS:
        yield "columns", f"run --data csv:a.csv {flags} --rounds 1"
    for name, number in itertools.product(_GOOD, _ARRAYS):
        if (name, number) not in _FITTING:
            yield "arrays", f"run --data 'npz:{name}-{number}.npz' --rounds 1"
    for name in ("x", "y"):
        yield "arrays", f"run --data npz:no-{name}.npz --rounds 1"
    for name, kind in itertools.product(_LEAF, ("leaf", "mat", "npz", "folder")):
        yield "leaf", f"run --data '{kind}:{name}.json' --client who --target y --rounds 1"
    for name in _LEAF:
        yield "leaf", f"run --data 'leaf:{name}.json' --rounds 1"
    for number, text in enumerate(_TOML):
        command = "sweep" if "sweep" in text or "=[" in text else "run"
        yield "files", f"{command} {number}.toml --out r"
    roles = ("algorithm", "model", "mechanism", "sampling")
    for role, factory in itertools.product(roles, _FACTORIES.split()):
        yield "own code", f"run {few} --{role} malformed:{factory}"
    for role in roles:
        yield "own code", f"run {few} --{role} unreadable:f"
    for plan in _PLANS:
        for flags in _spelled(_OF_PLANS):
            yield "plans", f"privacy {plan} {flags}"
    for words in _RESULTS:
        yield "results", words


def commands(count: int | None = None) -> list[tuple[str, str]]:
    """Return `count` of the commands, kinds in turn, or all; with their kinds."""
    found = list(dict.fromkeys(_all()))
    random.Random(0).shuffle(found)
    if count is None:
        return found
    kinds: dict[str, list[tuple[str, str]]] = {}
    for kind, words in found:
        kinds.setdefault(kind, []).append((kind, words))
    turns = itertools.chain.from_iterable(itertools.zip_longest(*kinds.values()))
    return list(itertools.islice(filter(None, turns), count))


def fault(code: int, error: str) -> str:
    """Return what is wrong with an answer to a malformed command; "" where nothing is."""
    if code != 2:
        return f"exit code {code}"
    if not error.startswith("fedjaxsim: error: ") or error.count("\n") != 1:
        return "not one line"
    return f"{len(error)} characters" if len(error) > _LONGEST else ""


def _try(words: str, folder: Path) -> str:
    """Run a command in a fork of this process; return what is wrong with its answer."""
    with tempfile.TemporaryFile("w+") as error:
        child = os.fork()
        if child == 0:
            from fedjaxsim.cli import main
            from fedjaxsim.report import progress

            progress.SLOW = 1e6  # no line that says what takes long
            os.chdir(folder)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(error.fileno(), 2)
            sys.path.insert(0, "")
            sys.exit(main(shlex.split(words)))
        begin, code = time.monotonic(), None
        while code is None and time.monotonic() < begin + _SECONDS:
            done, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else time.sleep(0.02)
        if code is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hangs"
        error.seek(0)
        text = error.read()
        return f"{wrong}: {text[-600:]}" if (wrong := fault(code, text)) else ""


def main() -> int:
    """Try as many commands as the first argument says, and list those that are not refused."""
    import fedjaxsim.cli.running  # noqa: F401 - once for all; no device is in use before a fork

    folder, faults = Path(tempfile.mkdtemp()), 0
    make_files(folder)
    tried = commands(int(sys.argv[1]) if len(sys.argv) > 1 else None)
    for number, (kind, words) in enumerate(tried):
        if wrong := _try(words, folder):
            faults += 1
            print(f"{number} {kind}: fedjaxsim {words}\n  {wrong}", flush=True)
    shutil.rmtree(folder)
    print(f"{len(tried)} commands, {faults} not refused in one line")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
