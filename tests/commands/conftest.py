"""Commands in this process, and their answers."""

import json
import shlex

import pytest

from fedjaxsim.cli import main


@pytest.fixture
def ask(capsys):
    """Run a command and return its output."""

    def answer(command: str, code: int = 0) -> str:
        assert main(shlex.split(command)) == code
        return capsys.readouterr().out

    return answer


@pytest.fixture
def ask_json(ask):
    """Run a command with `--json` and return what it prints, which must be strict JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not strict JSON")

    return lambda command: json.loads(ask(f"{command} --json"), parse_constant=refuse)
