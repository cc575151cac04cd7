"""The reports of ``family_check`` for many families, each made in a process that checks a few of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.check_process import report_of
from tests.parallel import WORKER

Report = dict[str, str | None]
"""By check what went wrong, or None."""

_CHECKS: Final = "tests.e2e.family_check"
_PER_PROCESS: Final = 4
"""Families that share the imports of a process, which is ended after ten minutes."""
_NUM_PROCESSES: Final = 1 if WORKER in os.environ else 2
"""At a time: one for each process of tests, which have a core each."""


@contextmanager
def reports_of(
    request: pytest.FixtureRequest,
    folder: Callable[[str], Path],
    environment: Mapping[str, str] | None = None,
) -> Iterator[Callable[[str], Report]]:
    """Check the families that the module's selected tests are about; yields what waits for a report.

    Args:
        request: Of a fixture of the module whose tests have a parameter ``family``.
        folder: Makes a folder.
        environment: Variables of the processes.
    """
    families = families_of(request)
    with ThreadPoolExecutor(_NUM_PROCESSES) as pool:
        futures: dict[str, Future[dict[str, Report]]] = {}
        for start in range(0, len(families), _PER_PROCESS):
            share = families[start : start + _PER_PROCESS]
            made = pool.submit(report_of, _CHECKS, folder(share[0]), share, environment=environment)
            futures |= dict.fromkeys(share, made)
        yield lambda family: futures[family].result()[family]
        pool.shutdown(cancel_futures=True)


def families_of(request: pytest.FixtureRequest) -> Sequence[str]:
    """Return the families that the module's selected tests are about, in the order of the tests."""
    calls = [
        item.callspec
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    ]
    return list(dict.fromkeys(str(call.params["family"]) for call in calls))
