"""Commands in this process, and their answers."""

import json
import shlex

import jsonschema
import pytest
from support.json_schemas import SCHEMAS

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
    """Run a command with `--json` and return what it prints: strict JSON that fits its schema."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not strict JSON")

    def answer(command: str):
        found = json.loads(ask(f"{command} --json"), parse_constant=refuse)
        jsonschema.validate(found, SCHEMAS[command.split()[0]])
        return found

    return answer
