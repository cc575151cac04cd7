"""What a person sees while a remote trace runs: where it is, what its block prints, how much is through.

Short traces show nothing but what they print. One that takes longer gets a line at the end of the terminal,
which goes again with it. ``CONFIG.APP.REMOTE_LOGGING = False`` turns all of it off.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from api_schemas.jobs import JobStatus
from nnsight_engine.core.config import CONFIG

_QUIET_S: Final = 0.5
_WIDTH: Final = 10


class Display:
    """Shows one trace; a context manager."""

    def __init__(self) -> None:
        """Show nothing yet."""
        self._shows = CONFIG.APP.REMOTE_LOGGING
        self._console = Console(stderr=True)
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._bars: Progress | None = None
        self._status: TaskID | None = None
        self._transfers: dict[str, TaskID] = {}
        self._text = ""

    def __enter__(self) -> Self:
        """Begin to wait; the line comes after a while, and only on a terminal."""
        if self._shows and (self._console.is_terminal or self._console.is_jupyter):
            self._timer = threading.Timer(_QUIET_S, self._start)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the line away."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._bars is not None:
                self._bars.stop()

    def event(self, event: dict[str, Any]) -> None:
        """Show something that happened."""
        status, job = str(event.get("status")), str(event.get("job") or "")
        message = event.get("message")
        if status == JobStatus.LOG:
            if self._shows:
                prefix = f"[{job}] " if job else ""
                sys.stdout.write(f"{prefix}{status:<{_WIDTH}}: {message}\n")
            return
        where = f" on {event['engine']}" if event.get("engine") else ""
        self._text = f"{status}{where}{f': {message}' if message else ''}"
        with self._lock:
            if self._bars is not None and self._status is not None:
                self._bars.update(self._status, description=self._text)

    def progress(self, way: str, num_bytes: int, total: int) -> None:
        """Show how much of a transfer is through."""
        with self._lock:
            if self._bars is None:
                return
            if way not in self._transfers:
                self._transfers[way] = self._bars.add_task(way, total=total)
            self._bars.update(self._transfers[way], completed=num_bytes, total=total)

    def _start(self) -> None:
        with self._lock:
            if self._timer is None:  # over by now
                return
            self._bars = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._status = self._bars.add_task(self._text or "sending", total=None)
            self._bars.start()
