"""The command of all tables: every table has its options and its line in the documentation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import arguments_of
from benchmarks.process import ChildObject, ProcessError
from benchmarks.runner import parser_of, table_module
from benchmarks.tables import TABLES

ECHO = "tests.unit.benchmarks.echo:Echo"
COMMON = {"--repeats", "--processes", "--quick", "--add", "--profile", "--output"}


@pytest.mark.parametrize("table", TABLES)
def test_every_table_has_options_of_its_own_and_is_documented(table: str) -> None:
    own = set(re.findall(r"--[a-z-]+", parser_of(table).format_usage()))
    assert not own & COMMON
    assert callable(table_module(table).plan)
    page = Path(__file__).parents[3] / "docs" / "development.md"
    assert f"`{table}`" in page.read_text(encoding="utf-8")


def test_the_command_splits_its_options_from_the_table_s_and_the_engine_s() -> None:
    args, rest = arguments_of(["startup", "--compile", "--quick", "--", "--max-model-len", "64"])
    assert (args.table, args.quick, args.repeats, args.processes) == ("startup", True, 1, 1)
    assert parser_of("startup").parse_args(rest).compile
    assert args.engine_arguments == ["--max-model-len", "64"]
    args, rest = arguments_of(["--mode", "eager"])
    assert (args.table, args.repeats, args.processes, rest) == ("serving", 5, 3, ["--mode", "eager"])


def test_an_unknown_table_is_refused_with_the_names_of_all() -> None:
    command = [sys.executable, "-m", "benchmarks", "htpp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "got htpp" in done.stderr
    assert all(name in done.stderr for name in TABLES)


def test_a_child_answers_until_it_fails_and_then_says_why() -> None:
    with ChildObject(ECHO, "a", variables={"PYTHONWARNINGS": "ignore"}) as child:
        assert child.call("answer", 1) == ["a", 1]
        assert child.call("answer", value=2) == ["a", 2]
        with pytest.raises(ProcessError, match="ended with status 1: ValueError: -1 is negative") as raised:
            child.call("answer", -1)
    assert "Traceback" in raised.value.output


def test_a_child_that_does_not_answer_in_time_is_given_up() -> None:
    with ChildObject(ECHO, limit_s=0.01) as child:
        for _ in range(2):
            with pytest.raises(ProcessError, match="gave no answer within"):
                child.call("wait", 60)


@pytest.mark.heavy
def test_a_table_is_measured_in_two_processes_and_written(tmp_path: Path) -> None:
    options = ["--repeats", "2", "--processes", "2", "--output", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks", "serialization", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    (file,) = tmp_path.glob("*-serialization.json")
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 16
    assert all((row["num_repeats"], row["num_processes"]) == (2, 2) and row["value"] > 0 for row in rows)
    assert "`encode_trace` and `decode_trace`" in file.with_suffix(".md").read_text(encoding="utf-8")
