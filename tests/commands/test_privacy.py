"""The privacy commands: reference values, what they print and what they refuse."""

import math
import re

import pytest

ADJACENCIES = ("zero_out", "replace")
VIEWS = ("joint_dp", "released_sequence")
PLAN = "--sampling-rate 0.02 --noise-multiplier 1 --rounds 2000 --delta 1e-4"
FULL = "--sampling-rate 1 --noise-multiplier 4 --rounds 10 --delta 1e-5"
FEMNIST = f"--noise-multiplier 25 --rounds 1000 --delta {1 / 205} --sampling fixed"


def only(answer: dict, adjacency: str, view: str = "joint_dp") -> dict:
    [found] = answer["guarantee"][adjacency][view].values()
    return found


@pytest.mark.parametrize(
    ("plan", "zero_out", "replace", "digits"),
    [
        (PLAN, 4.841, 8.320, 6e-4),
        (FULL, 3.3414, 7.5113, 6e-5),
        (FULL.replace("--sampling-rate 1", "--sampling full"), 3.3414, 7.5113, 6e-5),
        (f"{FEMNIST} --clients 205 --capacity 100", 2.214, 5.526, 6e-4),
    ],
)
def test_reference_values(ask_json, plan, zero_out, replace, digits):
    found = ask_json(f"privacy {plan}")
    assert only(found, "zero_out")["epsilon"] == pytest.approx(zero_out, abs=digits)
    assert only(found, "replace")["epsilon"] == pytest.approx(replace, abs=digits)


@pytest.mark.parametrize("plan", [PLAN, FULL, f"{FEMNIST} --clients 5 --capacity 2"])
def test_every_printed_epsilon_is_in_the_json(ask, ask_json, plan):
    text, nested = ask(f"privacy {plan}"), ask_json(f"privacy {plan}")["guarantee"]
    printed = re.findall(r"(\w+), (\w+): ε [=≤] ([\d.]+) at δ = \S+ \((\w+)\)", text)
    assert {tuple(line[:2]) for line in printed} == {(a, v) for a in ADJACENCIES for v in VIEWS}
    assert text.count(" ε = ") + text.count(" ε ≤ ") == len(printed)
    for adjacency, view, epsilon, accountant in printed:
        exact = nested[adjacency][view][accountant]["epsilon"]
        # Five digits, rounded up; the ratio of neighbours is at most 1 + 1e-4.
        assert exact * (1 - 1e-12) <= float(epsilon) <= exact * (1 + 1e-4)
        for sentence in nested[adjacency][view][accountant]["assumptions"]:
            assert sentence in text


@pytest.mark.thorough
def test_what_was_assumed_is_said_and_changes_nothing(ask, ask_json):
    plan = "privacy --sampling-rate 0.1 --noise-multiplier 2 --rounds 100 --delta 1e-5"
    text = ask(plan)
    assert "The number of clients was not given: 10000 stand for any" in text
    assert "Cohorts have room for all clients" in text
    alone, known = ask_json(plan), ask_json(f"{plan} --clients 100")
    assert only(alone, "zero_out")["epsilon"] == only(known, "zero_out")["epsilon"]
    assert "was not given" not in ask(f"{plan} --clients 100")
    capped = only(ask_json(f"{plan} --clients 100 --capacity 20"), "zero_out")
    assert capped["epsilon"] > only(known, "zero_out")["epsilon"]


def test_the_share_alone_decides_under_fixed_size_sampling(ask_json):
    plan = "privacy --sampling fixed --noise-multiplier 5 --rounds 50 --delta 1e-5"
    share, sizes = (
        ask_json(f"{plan} {flags}")
        for flags in ("--clients 640 --capacity 80", "--clients 64 --capacity 8")
    )
    for adjacency in ADJACENCIES:
        for view in VIEWS:
            epsilon = only(sizes, adjacency, view)["epsilon"]
            assert only(share, adjacency, view)["epsilon"] == pytest.approx(epsilon, rel=1e-12)
    zero_out = only(sizes, "zero_out", "released_sequence")["epsilon"]
    assert zero_out <= only(sizes, "zero_out")["epsilon"]


def test_without_noise_epsilon_is_null(ask, ask_json):
    plan = FULL.replace("--noise-multiplier 4", "--noise-multiplier 0")
    assert only(ask_json(f"privacy {plan}"), "replace")["epsilon"] is None
    assert "no guarantee (no noise was added)" in ask(f"privacy {plan}")


@pytest.mark.parametrize(
    "adjacency", [pytest.param("zero_out", marks=pytest.mark.thorough), "replace"]
)
def test_the_noise_found_meets_the_target(ask, ask_json, adjacency):
    plan = "--sampling-rate 0.05 --rounds 200 --delta 1e-5"
    command = f"privacy --epsilon 1.5 {plan} --adjacency {adjacency}"
    found = ask_json(command)
    epsilon = only(found, adjacency)["epsilon"]
    assert 1.5 * (1 - 2e-3) <= epsilon <= 1.5
    # The number that is printed for people leads to the same report.
    match = re.match(r"noise multiplier: (\S+)\n", ask(command))
    assert match
    again = ask_json(f"privacy {plan} --noise-multiplier {match[1]}")
    assert float(match[1]) == found["noise_multiplier"]
    assert again == found


def test_the_rounds_found_are_the_most_that_meet_the_target(ask_json):
    plan = "--sampling full --noise-multiplier 4 --delta 1e-5"
    found = ask_json(f"privacy --epsilon 3.3415 {plan}")
    assert found["rounds"] == 10
    assert only(found, "zero_out")["epsilon"] == pytest.approx(3.3414, abs=6e-5)
    assert ask_json(f"privacy --epsilon 3.341 {plan}")["rounds"] == 9


@pytest.mark.thorough
def test_the_rate_found_meets_the_target(ask_json):
    found = ask_json("privacy --epsilon 2 --noise-multiplier 1 --rounds 50 --delta 1e-5")
    epsilon = only(found, "zero_out")["epsilon"]
    assert 2 * (1 - 2e-3) <= epsilon <= 2
    plan = f"--noise-multiplier 1 --rounds 50 --delta 1e-5 --sampling-rate {found['sampling_rate']}"
    assert only(ask_json(f"privacy {plan}"), "zero_out")["epsilon"] == epsilon


@pytest.mark.thorough
def test_a_schedule_changes_the_rate_that_meets_a_target(ask_json):
    command = "privacy --epsilon 1 --noise-multiplier 1 --rounds 2 --delta 1e-5 --noise-schedule"
    found, even = (ask_json(f"{command} {budget}") for budget in ("power:2", "constant"))
    assert 1 - 2e-3 <= only(found, "zero_out")["epsilon"] <= 1
    assert found["sampling_rate"] < 0.95 * even["sampling_rate"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("epsilon --delta 0", "delta"),
        ("epsilon --delta nan", "delta"),
        ("epsilon --sampling-rate 1.5", "sampling-rate"),
        ("epsilon --sampling-rate 0", "sampling-rate"),
        ("epsilon --noise-multiplier -1", "noise-multiplier"),
        ("epsilon --noise-multiplier nan", "noise-multiplier"),
        ("epsilon --rounds 0", "rounds"),
        ("epsilon --rounds 9999999999", "rounds"),
        ("epsilon --clients 0", "clients"),
        ("epsilon --capacity 5", "capacity"),
        ("epsilon --clients 4 --capacity 5", "capacity"),
        ("epsilon --sampling passes", "sampling"),
        ("epsilon --sampling full", "sampling-rate"),
        ("epsilon --sampling fixed --clients 205", "capacity"),
        ("noise --epsilon 0", "epsilon"),
        ("noise --epsilon 1e-12", "epsilon"),
        ("rounds --epsilon inf", "epsilon"),
        ("rounds --epsilon 1 --noise-multiplier 0", "noise-multiplier"),
        ("rounds --epsilon 1 --noise-multiplier 1e13", "noise-multiplier"),
        ("rounds --epsilon 1 --noise-schedule power:1", "noise-schedule"),
        ("rate --epsilon 1 --noise-schedule linear", "noise-schedule"),
        ("rate --epsilon 1 --rounds 0", "rounds"),
        ("rate --epsilon 1 --noise-multiplier 0", "noise-multiplier"),
    ],
)
def test_bad_input_is_refused_in_one_line(refused, command, words):
    name, *flags = command.split()
    given = {
        "epsilon": PLAN,
        "noise": "--sampling-rate 0.02 --rounds 2000 --delta 1e-4",
        "rounds": "--sampling-rate 0.02 --noise-multiplier 1 --delta 1e-4",
        "rate": "--noise-multiplier 1 --rounds 2000 --delta 1e-4",
    }[name]
    for flag in flags[::2]:
        given = re.sub(rf"{flag} \S+", "", given)
    assert words in refused(" ".join(["privacy", given, *flags]))


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ("", "--delta"),
        ("--delta 0.1", "not given: noise-multiplier, rounds"),
        ("--delta 0.1 --epsilon 1", "all but one"),
        (f"{PLAN} --epsilon 1", "leave out one of"),
        (f"{PLAN} --adjacency replace", "no effect without epsilon"),
        (
            "--epsilon 0.0001 --sampling-rate 0.5 --noise-multiplier 0.1 --delta 1e-5",
            "not even one round",
        ),
    ],
)
def test_too_few_or_too_many_numbers_are_refused(refused, numbers, words):
    assert words in refused(f"privacy {numbers}")


def test_a_rate_that_is_needed_is_asked_for(refused):
    plan = "--noise-multiplier 1 --rounds 9 --delta 1e-5"
    assert "sampling-rate" in refused(f"privacy {plan} --sampling poisson")


def test_the_ledger_is_that_of_the_numbers_typed(ask_json):
    # μ = √T/z, and δ(ε) of μ-GDP at ε = 1 is Φ(−1/μ + μ/2) − e Φ(−1/μ − μ/2).
    mu = math.sqrt(3) / 5.1
    phi = [0.5 * math.erfc(-x / math.sqrt(2)) for x in (mu / 2 - 1 / mu, -mu / 2 - 1 / mu)]
    delta = phi[0] - math.e * phi[1]
    plan = f"--sampling full --noise-multiplier 5.1 --rounds 3 --delta {delta}"
    found = only(ask_json(f"privacy {plan}"), "zero_out")
    assert found["epsilon"] == pytest.approx(1, rel=1e-9)


def test_a_plan_is_verified_with_another_accountant(ask, ask_json):
    text = ask(f"privacy {FULL} --verify")
    assert "zero_out: ε 3.3414, and by dp_accounting 3.3414 (δ = 1e-05)" in text
    second = ask_json(f"privacy {FULL} --verify")["dp_accounting"]
    assert second["replace"] == pytest.approx(7.5113, abs=6e-4)


def test_a_plan_is_plotted(ask, refused, tmp_path):
    pytest.importorskip("matplotlib")
    ask(f"privacy {FULL} --plot {tmp_path / 'plan.svg'}")
    assert (tmp_path / "plan.svg").is_file()
    assert "nothing to plot" in refused(
        f"privacy --sampling full --noise-multiplier 0 --rounds 1 --delta 1e-3 "
        f"--plot {tmp_path / 'none.png'}"
    )
    assert "plot must end in .png, .pdf or .svg" in refused(f"privacy {FULL} --plot plan.txt")
