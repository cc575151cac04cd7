"""What happens at the start with a version of vLLM that is not known."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from app.cli import main
from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.modeling.vllm import VLLM
from nnsight_engine.vllm_backend import versions
from nnsight_engine.vllm_backend.steps.vllm_names import USED_NAMES
from nnsight_engine.vllm_backend.versions import VersionCheck, VLLMSources, check_version
from tests.unit.vllm_backend.vllm_copies import changed_copy, installed_folder

Change = tuple[str, str, str]

OVERRIDDEN: Final = (
    "vllm/v1/core/sched/scheduler.py",
    "    def add_request(self, request: Request)",
    "    def enqueue(self, request: Request)",
)
"""Renames a method that the engine overrides."""

READ: Final = ("vllm/v1/core/sched/output.py", "    total_num_scheduled_tokens: int\n", "")
"""Removes a field that the engine reads."""

OWNERS: Final = ("vllm.v1.core.sched.scheduler:Scheduler", "vllm.v1.core.sched.output:SchedulerOutput")
NOT_KNOWN: Final = "is not a version that this engine knows (0.32, 0.33)"
COMPARED: Final = "has all names of vLLM that this engine uses, but its tests run on 0.32 only"
ADD_REQUEST: Final = "vllm.v1.core.sched.scheduler:Scheduler.add_request (overridden)"
TOTAL: Final = "vllm.v1.core.sched.output:SchedulerOutput.total_num_scheduled_tokens (read)"


@pytest.fixture(autouse=True)
def few_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare few names: a comparison of all takes a second, and is made in ``test_vllm_names``."""
    names = [one for one in USED_NAMES if one.owners[0] in OWNERS]
    # The order in which they are compared is not the order of the message.
    monkeypatch.setattr(versions, "USED_NAMES", sorted(names, key=lambda one: one.owners))


def _copy(folder: Path, version: str, *changes: Change) -> VLLMSources:
    path = "vllm/_version.py"
    text = (installed_folder() / path).read_text(encoding="utf-8")
    (line,) = re.findall(r"^__version__ = .*$", text, re.MULTILINE)
    return changed_copy(folder, (path, line, f"__version__ = version = {version!r}"), *changes)


def test_the_installed_version_is_known_and_is_not_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "differences", None)
    check_version("strict")
    assert not caplog.records


@pytest.mark.parametrize(
    ("choice", "version", "changes", "is_refused", "told"),
    [
        *(
            ("strict", version, [OVERRIDDEN], False, [])
            for version in ("0.32.0", "0.32.1", "0.32.0.post1", "0.32.0+cpu")
        ),
        ("strict", "0.33.0", [OVERRIDDEN], False, ["vLLM 0.33.0", COMPARED]),
        ("strict", "0.33.1+cpu", [OVERRIDDEN], False, ["vLLM 0.33.1 ", COMPARED]),
        ("off", "0.33.0", [OVERRIDDEN], False, []),
        ("off", "0.40.0", [OVERRIDDEN, READ], False, []),
        *(
            (choice, version, [], False, [version.partition("+")[0], NOT_KNOWN, "it uses are there"])
            for choice, version in (
                ("auto", "0.31.0"),
                ("auto", "0.40.0"),
                ("strict", "0.33.1.dev7+g0123"),
                ("warn", "0.33.0rc1"),
                ("auto", "dev"),
            )
        ),
        ("auto", "0.40.0", [OVERRIDDEN], True, ["vLLM 0.40.0", NOT_KNOWN, ADD_REQUEST]),
        ("auto", "0.40.0", [READ], False, ["vLLM 0.40.0", NOT_KNOWN, TOTAL]),
        ("strict", "0.40.0", [READ], True, [NOT_KNOWN, TOTAL]),
        ("warn", "0.40.0", [OVERRIDDEN], False, [NOT_KNOWN, ADD_REQUEST]),
        # Overridden names are shown first.
        ("auto", "0.40.0", [READ, OVERRIDDEN], True, [NOT_KNOWN, ADD_REQUEST, TOTAL]),
    ],
)
def test_a_version_is_used_or_refused_and_its_changes_are_named(
    choice: VersionCheck,
    version: str,
    changes: list[Change],
    is_refused: bool,
    told: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sources = _copy(tmp_path, version, *changes)
    if is_refused:
        with pytest.raises(UnsupportedOptionError, match="NNSIGHT_ENGINE_VLLM_VERSION_CHECK=warn") as refused:
            check_version(choice, sources)
        messages = [str(refused.value)]
    else:
        check_version(choice, sources)
        messages = caplog.messages
        assert {record.levelname for record in caplog.records} <= {"WARNING"}
    assert len(messages) == bool(told)
    assert re.search(".*".join(map(re.escape, told)), "".join(messages))
    assert "; and 0 more" not in "".join(messages)


def test_serve_stops_before_vllm_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = _copy(tmp_path, "0.40.0", OVERRIDDEN)
    monkeypatch.setattr(versions, "_installed", lambda: sources)
    assert main(["serve", "some/model", "--vllm-version-check", "auto"]) == 1
    message = capsys.readouterr().err
    assert f"nnsight-engine: vLLM 0.40.0 {NOT_KNOWN}" in message
    assert ADD_REQUEST in message
    assert main(["serve", "some/model", "--vllm-version-check", "sometimes"]) == 1
    assert "'auto', 'strict', 'warn' or 'off'" in capsys.readouterr().err


def test_a_local_engine_reads_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = _copy(tmp_path, "0.40.0", READ)
    monkeypatch.setattr(versions, "_installed", lambda: sources)
    model = VLLM("some/model")
    monkeypatch.setenv("NNSIGHT_ENGINE_VLLM_VERSION_CHECK", "strict")
    with pytest.raises(UnsupportedOptionError, match="total_num_scheduled_tokens"):
        model.dispatch()
    monkeypatch.setenv("NNSIGHT_ENGINE_VLLM_VERSION_CHECK", "maybe")
    with pytest.raises(UnsupportedOptionError, match="is one of auto, strict, warn, off, got 'maybe'"):
        model.dispatch()
