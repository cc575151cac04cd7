"""What a person sees of a remote trace."""

from __future__ import annotations

import time

import pytest

from nnsight_engine.core.config import CONFIG
from nnsight_engine.remote_backend.client import display as display_module
from nnsight_engine.remote_backend.client.display import Display
from tests.waiting import wait_for


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(display_module, "_QUIET_S", 0.01)


def shown_until(capsys: pytest.CaptureFixture[str], *texts: str) -> str:
    """Wait until a display has drawn these texts; returns all that it has drawn since the last call."""
    shown = ""

    def are_shown() -> bool:
        nonlocal shown
        shown += capsys.readouterr().err
        return all(text in shown for text in texts)

    wait_for(are_shown)
    return shown


def test_a_long_trace_shows_where_it_is_and_how_much_is_through(capsys: pytest.CaptureFixture[str]) -> None:
    with Display() as display:
        display.event({"status": "QUEUED", "message": "3 before this one", "job": "j"})
        shown_until(capsys, "3 before this one")
        display.event({"status": "RUNNING", "engine": "local", "job": "j"})
        display.progress("download", 5_000_000, 50_000_000)
        shown_until(capsys, "RUNNING on local", "5.0/50.0 MB")
    with Display() as display:
        time.sleep(0.1)
        display.progress("download", 5_000_000, None)
        shown = shown_until(capsys, "5.0 MB")
    shown += capsys.readouterr().err
    assert "/?" not in shown
    assert "? " not in shown


def test_output_that_goes_to_a_file_has_a_line_for_each_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setattr(display_module, "_QUIET_S", 0.3)
    with Display() as display:
        display.event({"status": "RECEIVED", "job": "trace-1"})
        display.event({"status": "QUEUED", "message": "3 before this one", "job": "trace-1"})
        assert capsys.readouterr().err == "", "short traces show nothing"
        time.sleep(1.0)
        display.event({"status": "RUNNING", "engine": "local", "job": "trace-1"})
        display.event({"status": "LOG", "message": "hello:", "job": "trace-1"})
        display.progress("download", 1, None)
    shown = capsys.readouterr()
    assert shown.err == (
        "[trace-1] RECEIVED\n[trace-1] QUEUED    : 3 before this one\n[trace-1] RUNNING   : on local\n"
    )
    assert shown.out == "[trace-1] LOG       : hello:\n"


@pytest.mark.parametrize("is_on_terminal", [True, False])
def test_what_is_shown_and_printed_can_be_turned_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, is_on_terminal: bool
) -> None:
    monkeypatch.setattr(CONFIG.APP, "REMOTE_LOGGING", False)
    if not is_on_terminal:
        monkeypatch.delenv("FORCE_COLOR")
    with Display() as display:
        display.event({"status": "RECEIVED", "job": "trace-1"})
        display.event({"status": "LOG", "message": "hello", "job": "trace-1"})
        time.sleep(0.1)
        display.event({"status": "RUNNING", "job": "trace-1"})
    assert capsys.readouterr() == ("", "")


def test_a_short_trace_shows_only_what_it_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display_module, "_QUIET_S", 60.0)
    with Display() as display:
        display.event({"status": "RUNNING", "job": "j"})
        display.progress("upload", 1, 2)
        display.event({"status": "LOG", "message": "hello", "job": "j"})
    assert capsys.readouterr() == ("[j] LOG       : hello\n", "")
