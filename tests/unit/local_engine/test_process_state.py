"""What a block changes of its process beside the model is as before for the next client."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nnsight_engine.local_engine.process_state import ProcessHooks, ProcessState

LOGGER = logging.getLogger("nnsight_engine.local_engine")


def state() -> list[Any]:
    return [
        sys.stdin, sys.stdout, sys.stderr, sys.excepthook, sys.unraisablehook, sys.displayhook,
        sys.breakpointhook, threading.excepthook, warnings.showwarning, warnings.formatwarning,
        list(warnings.filters), logging.root.manager.disable,
        *[(one.level, [*one.handlers], [*one.filters], one.propagate, one.disabled)
          for one in (logging.root, LOGGER)],
        *[signal.getsignal(number) for number in signal.valid_signals()],
        signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    ]  # fmt: skip


def _never_exited() -> None:
    warnings.catch_warnings().__enter__()
    warnings.simplefilter("ignore")


CHANGES: list[Callable[[], Any]] = [
    *(
        lambda name=name: setattr(sys, name, io.StringIO())
        for name in ("stdin", "stdout", "stderr", "excepthook", "unraisablehook", "breakpointhook")
    ),
    lambda: delattr(sys, "stdout"),
    lambda: setattr(threading, "excepthook", print),
    lambda: setattr(warnings, "showwarning", print),
    lambda: setattr(warnings, "formatwarning", print),
    lambda: warnings.simplefilter("error"),
    lambda: setattr(warnings, "filters", []),
    _never_exited,
    lambda: logging.disable(logging.CRITICAL),
    lambda: logging.root.addHandler(logging.StreamHandler(io.StringIO())),
    lambda: LOGGER.addHandler(logging.NullHandler()),
    lambda: LOGGER.addFilter(lambda _record: False),
    lambda: LOGGER.setLevel(logging.DEBUG),
    lambda: setattr(LOGGER, "propagate", False),
    lambda: setattr(LOGGER, "disabled", True),
    lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]),
    lambda: signal.alarm(1000),
]


@pytest.fixture
def hooks() -> Iterator[ProcessHooks]:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    snapshot = ProcessHooks()
    yield snapshot
    snapshot.restore()
    for number, handler in before.items():
        with contextlib.suppress(OSError, TypeError):
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_block_is_undone(change: Callable[[], Any], hooks: ProcessHooks) -> None:
    before = state()
    change()
    assert hooks.restore()
    assert state() == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with pytest.warns(UserWarning, match="shown"):
        warnings.warn("shown", UserWarning, stacklevel=1)


def test_a_block_may_change_into_a_folder_that_is_removed(tmp_path: Path) -> None:
    here = Path.cwd()
    snapshot = ProcessState()
    try:
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        assert snapshot.restore()
        assert Path.cwd() == here
    finally:
        os.chdir(here)


def test_a_folder_that_a_block_has_removed_cannot_be_restored(tmp_path: Path) -> None:
    here, folder = Path.cwd(), tmp_path / "folder"
    folder.mkdir()
    os.chdir(folder)
    try:
        snapshot = ProcessState()
        os.chdir(here)
        folder.rmdir()
        assert not snapshot.restore()
    finally:
        os.chdir(here)
