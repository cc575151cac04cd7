"""The command of all tables: every table has its options and its line in the documentation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import arguments_of
from benchmarks.process import Process, ProcessError
from benchmarks.runner import parsed, parser_of
from benchmarks.tables import TABLES

ECHO = "tests.unit.benchmarks.echo"
COMMON = {"--repeats", "--processes", "--quick", "--add", "--profile", "--output", "--process", "--events-fd"}


@pytest.mark.parametrize("table", TABLES)
def test_every_table_has_options_of_its_own_and_is_documented(table: str) -> None:
    parser, module = parser_of(table)
    own = set(re.findall(r"--[a-z-]+", parser.format_usage()))
    assert not own & COMMON
    assert callable(module.plan)
    page = Path(__file__).parents[3] / "docs" / "development.md"
    assert f"`{table}`" in page.read_text(encoding="utf-8")


def test_the_command_splits_its_options_from_the_table_s_and_the_engine_s() -> None:
    args, rest = arguments_of(["startup", "--compile", "--quick", "--", "--max-model-len", "64"])
    assert (args.table, args.quick, args.repeats, args.processes) == ("startup", True, 1, 1)
    parser, _ = parser_of("startup")
    own = parsed(parser, rest)
    assert (own.compile, own.rest) == (True, ["--max-model-len", "64"])
    args, rest = arguments_of(["--mode", "eager"])
    assert (args.table, args.repeats, args.processes, rest) == ("serving", 5, 3, ["--mode", "eager"])


def test_an_unknown_table_is_refused_with_the_names_of_all() -> None:
    command = [sys.executable, "-m", "benchmarks", "htpp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "got htpp" in done.stderr
    assert all(name in done.stderr for name in TABLES)


def test_a_child_answers_until_it_fails_and_then_says_why() -> None:
    with Process(ECHO, "a", variables={"PYTHONWARNINGS": "ignore"}) as process:
        assert process.ask(value=1) == ["a", 1]
        assert process.ask(value=2) == ["a", 2]
        with pytest.raises(ProcessError, match="ended with status 1: ValueError: -1 is negative") as raised:
            process.ask(value=-1)
    assert "Traceback" in raised.value.output


def test_a_child_that_does_not_answer_in_time_is_given_up() -> None:
    with Process(ECHO, limit_s=0.01) as process, pytest.raises(ProcessError, match="no answer within"):
        process.read()
