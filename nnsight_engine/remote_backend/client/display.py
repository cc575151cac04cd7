"""Terminal output of a remote trace: status, prints and transfers; none without ``APP.REMOTE_LOGGING``.

A short trace shows only its prints, a longer one a status line at the end of the terminal.
"""

from __future__ import annotations

import sys
import threading
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
    """Shows nothing for ``_QUIET_S``: then a status line on a terminal, elsewhere a line for each status."""

    def __init__(self) -> None:
        self._shows = CONFIG.APP.REMOTE_LOGGING
        self._console = Console(stderr=True)
        self._is_terminal = self._console.is_terminal or self._console.is_jupyter
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._appeared = False
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._text = "sending"
        self._lines = ""

    def __enter__(self) -> Self:
        if self._shows:
            self._timer = threading.Timer(_QUIET_S, self._appear)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._bars is not None:
                self._bars.stop()

    def event(self, event: dict[str, Any]) -> None:
        """Show what a block printed at once; other events as the status."""
        status, job = str(event.get("status")), str(event.get("job") or "")
        message = event.get("message")
        if status == JobStatus.LOG:
            if self._shows:
                sys.stdout.write(_line(job, status, str(message)))
            return
        engine_note = f"on {event['engine']}" if event.get("engine") else ""
        with self._lock:
            self._text = f"{status} {engine_note}".rstrip() + (f": {message}" if message else "")
            self._lines += _line(job, status, ": ".join(filter(None, (engine_note, message))))
            if self._appeared:
                self._draw()

    def progress(self, way: str, num_bytes: int, total: int | None) -> None:
        """Display the progress of a transfer; ``total`` is None if unknown."""
        with self._lock:
            if self._bars is not None:
                self._bars.update(self._task(way, total), completed=num_bytes, total=total)

    def _appear(self) -> None:
        """Begin to show, by the timer's thread, as the trace has taken ``_QUIET_S``."""
        with self._lock:
            if self._timer is None:  # the trace is over
                return
            self._appeared = True
            if self._is_terminal:
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
            self._draw()
            if self._bars is not None:
                self._bars.start()

    def _draw(self) -> None:
        """Show the status, or on no terminal its new lines; the lock is held."""
        if self._bars is not None:
            self._bars.update(self._task("", None), description=self._text)
        else:
            sys.stderr.write(self._lines)
            sys.stderr.flush()
        self._lines = ""

    def _task(self, name: str, total: int | None) -> TaskID:
        """Return the progress bar of a transfer, or of the status for an empty name; made when first used."""
        assert self._bars is not None  # noqa: S101 - otherwise there are no tasks
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total)
        return self._tasks[name]


def _line(job: str, status: str, message: str) -> str:
    prefix = f"[{job}] " if job else ""
    return f"{prefix}{status:<{_WIDTH}}: {message}\n" if message else f"{prefix}{status}\n"
