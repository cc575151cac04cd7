"""Terminal output of a remote trace: status, prints and transfers; none without ``APP.REMOTE_LOGGING``.

A short trace shows only its prints, a longer one a status line at the end of the terminal.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Final, Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from api_schemas.jobs import JobStatus
from nnsight_engine.core.config import CONFIG

_QUIET_S: Final = 0.5
_WIDTH: Final = 10


class _Bytes(DownloadColumn):
    """Transferred bytes, and the total if known; empty for tasks that are not transfers."""

    def render(self, task: Task) -> Text:
        if task.total is not None:
            return super().render(task)
        return Text(decimal(int(task.completed)) if task.completed else "", style="progress.download")


class _Speed(TransferSpeedColumn):
    def render(self, task: Task) -> Text:
        return super().render(task) if task.speed or task.finished_speed else Text("")


class Display:
    def __init__(self) -> None:
        self._shows = CONFIG.APP.REMOTE_LOGGING
        self._console = Console(stderr=True)
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._bars: Progress | None = None
        self._status: TaskID | None = None
        self._transfers: dict[str, TaskID] = {}
        self._text = ""
        self._is_terminal = self._console.is_terminal or self._console.is_jupyter
        self._lines: list[str] = []
        self._has_waited = False

    def __enter__(self) -> Self:
        """Start the timer after which the status line appears."""
        if self._shows and self._is_terminal:
            self._wait(self._start)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._bars is not None:
                self._bars.stop()

    def event(self, event: dict[str, Any]) -> None:
        status, job = str(event.get("status")), str(event.get("job") or "")
        message = event.get("message")
        if status == JobStatus.LOG:
            if self._shows:
                sys.stdout.write(_line(job, status, str(message)))
            return
        where = f"on {event['engine']}" if event.get("engine") else ""
        detail = ": ".join(filter(None, (where, message)))
        self._text = f"{status} {where}".rstrip() + (f": {message}" if message else "")
        with self._lock:
            if self._bars is not None and self._status is not None:
                self._bars.update(self._status, description=self._text)
            self._keep(_line(job, status, detail))

    def progress(self, way: str, num_bytes: int, total: int | None) -> None:
        """Display the progress of a transfer; ``total`` is None if unknown."""
        with self._lock:
            if self._bars is None:
                return
            if way not in self._transfers:
                self._transfers[way] = self._bars.add_task(way, total=total)
            self._bars.update(self._transfers[way], completed=num_bytes, total=total)

    def _wait(self, then: Callable[[], None]) -> None:
        self._timer = threading.Timer(_QUIET_S, then)
        self._timer.daemon = True
        self._timer.start()

    def _keep(self, line: str) -> None:
        """Queue a line, or write it immediately if the trace has already taken a while."""
        if self._is_terminal or not self._shows:
            return
        self._lines.append(line)
        if self._has_waited:
            self._write_lines()
        elif self._timer is None:
            self._wait(self._write)

    def _write(self) -> None:
        with self._lock:
            if self._timer is None:  # the trace is over
                return
            self._has_waited = True
            self._write_lines()

    def _write_lines(self) -> None:
        sys.stderr.write("".join(self._lines))
        sys.stderr.flush()
        self._lines.clear()

    def _start(self) -> None:
        with self._lock:
            if self._timer is None:  # the trace is over
                return
            self._bars = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                _Bytes(),
                _Speed(),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._status = self._bars.add_task(self._text or "sending", total=None)
            self._bars.start()


def _line(job: str, status: str, message: str) -> str:
    prefix = f"[{job}] " if job else ""
    return f"{prefix}{status:<{_WIDTH}}: {message}\n" if message else f"{prefix}{status}\n"
