"""The report of a sweep has the numbers of its files."""

from report_pages import PICTURE, read

from fedjaxsim.cli import main
from fedjaxsim.privacy.events import Entry, Gaussian, PrivacySpend, SamplingScheme
from fedjaxsim.privacy.guarantee import report
from fedjaxsim.runs.sweep_directory import SweepDirectory
from fedjaxsim.runs.sweep_report import CHOSEN_ON_TEST
from fedjaxsim.runs.sweep_runs import resolve_sweep


def test_a_sweep_says_what_its_files_hold(tmp_path):
    plan = resolve_sweep({"rounds": 4}, [{"lam": (0.1, 0.3), "seed": (0, 1)}])
    sweep = SweepDirectory.open(tmp_path / "sweep", plan, {"fedjaxsim": "0.1.0"}, "f1d0")
    # The seeds of λ = 0.1 have 0.4 and 0.6, those of λ = 0.3 0.6 and 0.8; the worst tenth 0.1 less.
    values = {
        run: 0.2 * one.seed + {0.1: 0.4, 0.3: 0.6}[one.lam] for run, one in enumerate(plan.runs)
    }
    rows = [
        {"run": run, "round": round_, "train_loss": None, "epsilon": 0.5 * round_,
         "epsilon_replace": None, "delta": 0.01, "test_accuracy": value,
         "test_accuracy_worst_tenth": value - 0.1}
        for run, value in values.items() for round_ in (0, 4)
    ]  # fmt: skip
    sweep.add(rows, seconds=2.0, compile_seconds=8.0)
    charged = PrivacySpend(SamplingScheme("full", 5, 5), Gaussian(), (Entry(2.0, 1.0, 4),))
    plans = [{"runs": [0, 1, 2, 3], "noise_multiplier": 2.0,
              "guarantee": report([charged], 0.01).to_json()}]  # fmt: skip
    summary = {"runs": 4, "finished": 4, "failed": 0, "metric": "test_accuracy", "rounds": 4,
               "best_over": ["lam"], "choice": CHOSEN_ON_TEST,
               "peak_bytes": 10**9, **sweep.times()}  # fmt: skip
    traffic = {
        "algorithm": "pmtl",
        "runs": [0, 1, 2, 3],
        "message_bytes": 1000,
        "server_bytes": 0,
        "cohort": 5.0,
    }
    sweep.write_report(summary, plans, [traffic])
    (sweep.path / "envelopes.png").write_bytes(PICTURE)
    assert main(["report", str(sweep.path)]) == 0
    page = read(sweep.path / "report.html")
    assert page.headings[0] == (1, "Sweep of 4 runs")
    # Of 0.6 and 0.8 the deviation is 0.2/√2, and t of one degree of freedom is 12.706.
    assert "0.700 ± 1.271λ = 0.3" in page.text
    assert "chosen on the very test rows" in page.text
    assert "ε ≤ 2δ = 0.01, zero-out, joint DP" in page.text
    title = "test accuracy (fraction) at the end, best over λ, means over seeds with 95 % intervals"
    best = page.tables[title]
    assert best[1] == ["0.3", "0.700 ± 1.271", "0.141", "2", "2.000", "∞", "0.01"]
    assert page.tables["Communication of each run"][1] == [
        "pmtl (4 runs)",
        "1 kB",
        "0 B",
        "5",
        "20 kB",
        "0 B",
    ]
    assert page.tables["Time and memory of the sweep"][1] == ["2 s", "8 s", "1 GB"]
    assert page.tables["Data and seeds"][1] == ["sweep", "0, 1", "f1d0"]
    assert "ε = 2.3178 zero-out" in page.text
    (sweep.path / "report.json").write_text("{}")
    assert main(["report", str(sweep.path)]) == 2
