"""Numbers are read by every command in the same way."""

import pytest

from fedjaxsim.cli.program import parse
from fedjaxsim.factories import CommandLineText, Setting
from fedjaxsim.runs.settings_files import read_toml

_NOISE = "--noise-multiplier 1 --delta 1e-6 --sampling-rate 1e-3"


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("run --clients 1e3 --partition iid --rounds 1.5e2", {"clients": 1000, "rounds": 150}),
        ("run --model mlp --hidden 1e2,32", {"hidden": (100, 32)}),
        ("run --chunk-size None --rounds 1_000", {"chunk_size": None, "rounds": 1000}),
        ("tune --steps 1e1 --out there", {"steps": 10}),
        ("plan --data random --shape 7.84e2 --clients 1e9 --rows 2e1 --devices 1e0",
         {"shape": (784,), "clients": 10**9, "rows": (20,), "devices": 1}),
        ("audit --runs 1e1 --canaries 5.0", {"runs": 10, "canaries": 5}),
        ("data show --clients 1e2 --partition iid", {"clients": 100}),
        (f"privacy --clients 1e6 --rounds 1e2 {_NOISE}", {"clients": 10**6, "rounds": 100}),
        ("resume there --rounds 1e4", {"rounds": 10**4}),
        ("bench --repeats 3e0", {"repeats": 3}),
        ("demo --out there --seeds 1e0", {"seeds": 1}),
    ],
)  # fmt: skip
def test_whole_numbers_may_have_an_exponent(command, found):
    arguments = parse(command.split()).arguments
    settings = arguments.get("settings", ())
    places = [arguments, *(vars(each) for each in arguments.values() if hasattr(each, "__dict__"))]
    places += [each.values for each in (settings if isinstance(settings, tuple) else [settings])]
    for name, value in found.items():
        (read,) = (place[name] for place in places if name in place)
        assert read == value
        assert type(read) is type(value)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("run --clients 1e6x", "clients"),
        ("run --rounds 2.5", "rounds"),
        ("run --rounds 1e-1", "rounds"),
        ("run --rounds inf", "rounds"),
        ("run --rounds 1e999999999", "rounds"),
        ("run --rounds 1e-999999999", "rounds"),
        ("run --model mlp --hidden 1e2,x", "hidden"),
        ("run --lam abc", "lam"),
        ("run --epsilon abc", "epsilon"),
        ("plan --data random --shape 784,0.5", "shape"),
        ("plan --devices 0.5", "devices"),
        ("bench --repeats one", "repeats"),
        (f"privacy --rounds 1e {_NOISE}", "rounds"),
    ],
)
def test_what_is_no_number_is_refused_by_its_flag(command, name):
    with pytest.raises(ValueError, match=f"^{name}"):
        parse(command.split())


def test_a_large_number_with_an_exponent_is_exact():
    one = CommandLineText("1.000000000000000000001e21")
    assert Setting("n", int, 0).convert(one) == 10**21 + 1


def test_a_file_reads_whole_numbers_too(tmp_path):
    (tmp_path / "a.toml").write_text("clients = 1e6\nseed = 3.0\n")
    found = read_toml(tmp_path / "a.toml")
    assert (found.get("clients"), found.seed) == (10**6, 3)
    assert {type(found.get(name)) for name in ("clients", "seed")} == {int}
