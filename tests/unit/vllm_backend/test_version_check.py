"""What happens at the start with a version of vLLM that is not known."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from app.cli import main
from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.modeling.vllm import VLLM
from nnsight_engine.vllm_backend.steps.vllm_names import USED_NAMES
from nnsight_engine.vllm_backend.versions import check
from nnsight_engine.vllm_backend.versions.check import VersionCheck, check_version
from nnsight_engine.vllm_backend.versions.sources import VLLMSources
from tests.unit.vllm_backend.vllm_copies import changed_copy, installed_folder

OVERRIDDEN = (
    "vllm/v1/core/sched/scheduler.py",
    "    def add_request(self, request: Request)",
    "    def enqueue(self, request: Request)",
)
"""Renames a method that the engine overrides."""

READ = ("vllm/v1/core/sched/output.py", "    total_num_scheduled_tokens: int\n", "")
"""Removes a field that the engine reads."""

OWNERS = ("vllm.v1.core.sched.scheduler:Scheduler", "vllm.v1.core.sched.output:SchedulerOutput")


@pytest.fixture(autouse=True)
def few_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare few names: a comparison of all takes a second, and is made in ``test_vllm_names``."""
    names = [one for one in USED_NAMES if one.owners[0] in OWNERS]
    # The order in which they are compared is not the order of the message.
    monkeypatch.setattr(check, "USED_NAMES", sorted(names, key=lambda one: one.owners))


def _copy(folder: Path, version: str, *changes: tuple[str, str, str]) -> VLLMSources:
    path = "vllm/_version.py"
    text = (installed_folder() / path).read_text(encoding="utf-8")
    (line,) = re.findall(r"^__version__ = .*$", text, re.MULTILINE)
    return changed_copy(folder, (path, line, f"__version__ = version = {version!r}"), *changes)


def test_the_installed_version_is_known_and_is_not_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(check, "differences", None)
    check_version("strict")
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0.post1", "0.32.0+cpu"])
def test_patches_and_builds_of_the_tested_version_are_known(
    version: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_version("strict", _copy(tmp_path, version, OVERRIDDEN))
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.33.0", "0.33.1+cpu"])
def test_a_version_that_was_only_compared_starts_and_says_so(
    version: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sources = _copy(tmp_path, version, OVERRIDDEN)
    check_version("strict", sources)
    (message,) = caplog.messages
    assert message.startswith(f"vLLM {version.partition('+')[0]} has all names")
    assert message.endswith("its tests run on 0.32 only")
    caplog.clear()
    check_version("off", sources)
    assert not caplog.records


@pytest.mark.parametrize(
    ("choice", "version"),
    [
        ("auto", "0.31.0"),
        ("auto", "0.40.0"),
        ("strict", "0.33.1.dev7+g0123"),
        ("warn", "0.33.0rc1"),
        ("auto", "dev"),
    ],
)
def test_an_unknown_version_without_changes_starts_with_a_warning(
    choice: VersionCheck, version: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_version(choice, _copy(tmp_path, version))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert version.partition("+")[0] in record.message
    assert "all names of vLLM that it uses are there" in record.message


@pytest.mark.parametrize(
    ("choice", "change", "is_refused"),
    [
        ("auto", OVERRIDDEN, True),
        ("auto", READ, False),
        ("strict", OVERRIDDEN, True),
        ("strict", READ, True),
        ("warn", OVERRIDDEN, False),
        ("warn", READ, False),
    ],
)
def test_changes_of_an_unknown_version_are_named(
    choice: VersionCheck,
    change: tuple[str, str, str],
    is_refused: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sources = _copy(tmp_path, "0.40.0", change)
    name = "Scheduler.add_request" if change is OVERRIDDEN else "SchedulerOutput.total_num_scheduled_tokens"
    if is_refused:
        with pytest.raises(UnsupportedOptionError, match="NNSIGHT_ENGINE_VLLM_VERSION_CHECK=warn") as refused:
            check_version(choice, sources)
        message = str(refused.value)
    else:
        check_version(choice, sources)
        message = caplog.messages[0]
    assert message.startswith("vLLM 0.40.0 is not a version that this engine knows (0.32, 0.33)")
    assert f"{name} (" in message


def test_off_compares_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_version("off", _copy(tmp_path, "0.40.0", OVERRIDDEN, READ))
    assert not caplog.records


def test_overridden_names_are_shown_first(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOptionError) as refused:
        check_version("auto", _copy(tmp_path, "0.40.0", READ, OVERRIDDEN))
    first, second = str(refused.value).partition("changed: ")[2].split("; ")
    assert first.startswith("vllm.v1.core.sched.scheduler:Scheduler.add_request (overridden)")
    assert second.startswith("vllm.v1.core.sched.output:SchedulerOutput.total_num_scheduled_tokens (read)")


def test_serve_stops_before_vllm_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = _copy(tmp_path, "0.40.0", OVERRIDDEN)
    monkeypatch.setattr(check, "_installed", lambda: sources)
    assert main(["serve", "some/model", "--vllm-version-check", "auto"]) == 1
    message = capsys.readouterr().err
    assert "nnsight-engine: vLLM 0.40.0 is not a version that this engine knows" in message
    assert "Scheduler.add_request" in message
    assert main(["serve", "some/model", "--vllm-version-check", "sometimes"]) == 1
    assert "'auto', 'strict', 'warn' or 'off'" in capsys.readouterr().err


def test_a_local_engine_reads_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = _copy(tmp_path, "0.40.0", READ)
    monkeypatch.setattr(check, "_installed", lambda: sources)
    model = VLLM("some/model")
    monkeypatch.setenv("NNSIGHT_ENGINE_VLLM_VERSION_CHECK", "strict")
    with pytest.raises(UnsupportedOptionError, match="total_num_scheduled_tokens"):
        model.dispatch()
    monkeypatch.setenv("NNSIGHT_ENGINE_VLLM_VERSION_CHECK", "maybe")
    with pytest.raises(UnsupportedOptionError, match="is one of auto, strict, warn, off, got 'maybe'"):
        model.dispatch()
