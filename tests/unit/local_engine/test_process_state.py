"""What a block changes of its process beside the model is as before for the next client."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from nnsight_engine.local_engine.process_state import ProcessState

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
        torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(), torch.is_grad_enabled(),
        torch.get_num_threads(), os.environ.get("TEXT_OF_SOMEBODY"), os.getcwd(), list(sys.path),
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
    lambda: torch.use_deterministic_algorithms(mode=True),
    lambda: torch.set_default_dtype(torch.float64),
    lambda: torch.set_grad_enabled(mode=False),
    lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    lambda: os.environ.update(TEXT_OF_SOMEBODY="1"),
    lambda: os.chdir("/"),
    lambda: sys.path.insert(0, "/"),
    lambda: setattr(sys, "path", ["/", *sys.path]),
]


@pytest.fixture
def process() -> Iterator[ProcessState]:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    snapshot = ProcessState()
    yield snapshot
    snapshot.restore()
    for number, handler in before.items():
        with contextlib.suppress(OSError, TypeError):
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_block_is_undone(change: Callable[[], Any], process: ProcessState) -> None:
    before = state()
    change()
    assert process.restore()
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


def test_what_a_block_leaves_running_is_noticed_and_what_ends_is_not() -> None:
    process = ProcessState()
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert not process.restore()
    end.set()
    thread.join()
    threading.Thread(target=lambda: time.sleep(0.01)).start()
    assert process.restore()


class _EqualToAll:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__

    def __call__(self, *_: Any) -> None: ...


def test_a_handler_that_claims_to_be_equal_is_replaced(process: ProcessState) -> None:
    before, filters = signal.getsignal(signal.SIGUSR2), list(warnings.filters)
    signal.signal(signal.SIGUSR2, _EqualToAll())
    logging.root.handlers[:] = [cast("Any", _EqualToAll()) for _ in logging.root.handlers]
    assert process.restore()
    assert signal.getsignal(signal.SIGUSR2) is before
    assert not any(isinstance(one, _EqualToAll) for one in logging.root.handlers)
    assert list(warnings.filters) == filters


def test_a_logger_that_a_block_removed_is_no_error() -> None:
    logger = logging.getLogger("test.removed")
    process = ProcessState()
    del logging.root.manager.loggerDict[logger.name]
    logger.setLevel(logging.ERROR)
    assert process.restore()
    assert logger.level == logging.NOTSET
