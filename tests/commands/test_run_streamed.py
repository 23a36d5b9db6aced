"""`fedjaxsim run --streamed` on a folder, beside the same run in memory."""

import numpy as np
import pytest

from fedjaxsim.cli import main
from fedjaxsim.runs.directory import RunDirectory

CLIENTS = ["--clients", "12", "--seed", "5"]
RUN = [
    "run", "--seed", "5", "--loss", "squared", "--rounds", "4", "--eval-every", "2",
    "--sampling-rate", "0.5", "--learning-rate", "0.01", "--noise-multiplier", "1", "--quiet",
]  # fmt: skip


@pytest.mark.thorough
def test_a_streamed_run_of_a_folder_is_the_run_in_memory_and_goes_on(tmp_path):
    convert = ["data", "convert", "--data", "synthetic", *CLIENTS]
    folder = f"folder:{tmp_path}/clients"
    assert main([*convert, "--out", f"{tmp_path}/clients"]) == 0
    assert main([*RUN, "--data", folder, "--out", f"{tmp_path}/memory"]) == 0
    streamed = [*RUN, "--data", folder, "--streamed", "--out", f"{tmp_path}/streamed"]
    assert main(streamed) == 0
    for run in ("memory", "streamed"):
        assert main(["resume", f"{tmp_path}/{run}", "--rounds", "6", "--quiet"]) == 0
    memory, other = (RunDirectory(tmp_path / run) for run in ("memory", "streamed"))
    assert memory.guarantee() == other.guarantee()
    for one, two in zip(memory.metrics(), other.metrics(), strict=True):
        assert (one["round"], one["epsilon"]) == (two["round"], two["epsilon"])
        np.testing.assert_allclose(one["test_loss"], two["test_loss"], rtol=1e-5)


def test_a_streamed_sweep_is_refused_before_anything_is_written(refused, tmp_path):
    text = "streamed = true\nclients = 12\n[sweep]\nlam = [0.1, 0.2]\n"
    (tmp_path / "sweep.toml").write_text(text)
    assert "memory" in refused("sweep sweep.toml --out sweep")
