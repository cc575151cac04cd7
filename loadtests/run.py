"""Executes a run in a process of its own: ``python -m loadtests.run FOLDER``, with its definition on stdin.

Importing locust replaces this process's sockets and threads with gevent's, so it must precede their use.
Writes ``report.html``, locust's own report, and ``summary.json`` to the folder.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

import gevent
import locust.stats
import msgspec
from locust import LoadTestShape, User
from locust.html import get_html_report
from locust.log import setup_logging
from locust.runners import Runner

import loadtests.hostile
import loadtests.scenarios
from loadtests.records import Records
from loadtests.run_process import SUMMARY_FILE
from loadtests.run_spec import RunSpec
from loadtests.summary import Summary, write
from loadtests.users import Client, LoadEnvironment

REPORT_FILE: Final = "report.html"
_CLASSES: Final[dict[str, type[Client]]] = {
    kind.kind: kind for kind in (*loadtests.scenarios.POLITE, *loadtests.hostile.ATTACKS)
}


class LoadShape(LoadTestShape):
    """The number of users over time, by phase; locust queries it once per second."""

    load: LoadEnvironment

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # locust's has no types

    def tick(self) -> tuple[int, float] | None:
        """Return the number of users and the spawn rate per second; None at the end."""
        phase = self.load.phase
        if phase is None:
            return None
        num_users = sum(self.load.spec.counts.values()) * phase.load
        return num_users, float(num_users)


def run(spec: RunSpec, folder: Path) -> Summary:
    """Send the requests, write locust's report, and return the summary."""
    classes: list[type[User]] = [_CLASSES[kind] for kind in spec.counts]
    for kind, count in spec.counts.items():
        _CLASSES[kind].weight = count  # locust starts users in this proportion
    shape, records = LoadShape(), Records(spec)
    load = shape.load = LoadEnvironment(spec, classes, shape)
    load.events.request.add_listener(records.take)
    runner = load.create_local_runner()
    began, cpu_began = time.perf_counter(), time.process_time()
    history = gevent.spawn(locust.stats.stats_history, runner)
    load.began = began
    runner.start_shape()
    if runner.shape_greenlet is not None:
        runner.shape_greenlet.join()
    history.kill()
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    (folder / REPORT_FILE).write_text(get_html_report(load, show_download_link=False), encoding="utf-8")
    return Summary(
        scenario=spec.scenario,
        shape=spec.shape,
        url=spec.url,
        model=spec.model.name,
        seconds=seconds,
        users=sum(spec.counts.values()),
        client_cpu=cpu_s / seconds,
        rows=records.rows(),
        errors=dict(records.errors),
        crashes=_crashes(runner),
    )


def _crashes(runner: Runner) -> list[str]:
    return [f"{crash['msg']}\n{crash['traceback']}" for crash in runner.exceptions.values()]


def main() -> int:
    """Execute the run defined on standard input, and return the exit status."""
    spec, folder = msgspec.json.decode(sys.stdin.buffer.read(), type=RunSpec), Path(sys.argv[1])
    setup_logging("WARNING")
    write(folder / SUMMARY_FILE, run(spec, folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
