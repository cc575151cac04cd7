"""The command of all tables: every table has its options and its line in the documentation."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import arguments_of
from benchmarks.report import rows_of
from benchmarks.runner import parser_of, run, table_module
from benchmarks.tables import TABLES, gpu

COMMON = {"--repeats", "--processes", "--quick", "--add", "--profile", "--output"}


@pytest.mark.parametrize("table", TABLES)
def test_every_table_has_options_of_its_own_and_is_documented(table: str) -> None:
    own = set(re.findall(r"--[a-z-]+", parser_of(table).format_usage()))
    assert not own & COMMON
    assert callable(table_module(table).plan)
    page = Path(__file__).parents[3] / "docs" / "development.md"
    assert f"`{table}`" in page.read_text(encoding="utf-8")


def test_the_command_splits_its_options_from_the_table_s_and_the_engine_s(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args, rest = arguments_of(["startup", "--compile", "--quick", "--", "--max-model-len", "64"])
    assert (args.table, args.quick, args.repeats, args.processes) == ("startup", True, 1, 1)
    assert parser_of("startup").parse_args(rest).compile
    assert args.engine_arguments == ["--max-model-len", "64"]
    with pytest.raises(SystemExit):
        arguments_of(["htpp"])
    told = capsys.readouterr().err
    assert all(name in told for name in ("got htpp", *TABLES))


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


@pytest.mark.heavy
def test_the_table_of_the_gpu_does_without_one_what_it_times() -> None:
    num_threads = torch.get_num_threads()
    try:
        with contextlib.ExitStack() as stack:
            plan = gpu.plan(argparse.Namespace(part="small", device="cpu", quick=True), stack)
            *_, results = run(plan, 1)
    finally:
        torch.set_num_threads(num_threads)
    measured = {row.case: row.value for row in rows_of([results])}
    assert None not in measured.values()
    assert {"twelve saved values", "one request steered"} <= set(measured)
