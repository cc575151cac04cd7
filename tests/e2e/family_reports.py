"""The reports of ``family_check`` for many families, each made in a process that checks a few of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.check_process import report_of
from tests.parallel import group_of

Report = dict[str, str | None]
"""By check what went wrong, or None."""

_CHECKS: Final = "tests.e2e.family_check"
_PER_PROCESS: Final = 4
"""Families that share the imports of a process, which is ended after ten minutes."""


class FamilyReports:
    """Checks the families that the selected tests of a fixture's module are about, once one is asked for.

    These tests have ``family`` as their first parameter.
    """

    def __init__(
        self,
        request: pytest.FixtureRequest,
        folder: Callable[[str], Path],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._environment = environment
        self._reports: dict[str, Report] = {}
        self._shares: dict[str, Sequence[str]] = {}
        groups: dict[str, dict[str, None]] = {}
        for item in request.session.items:
            if isinstance(item, pytest.Function) and item.module is request.module:
                families = groups.setdefault(group_of(item.nodeid), {})
                families[str(item.callspec.params["family"])] = None
        for group in groups.values():
            names = list(group)
            for start in range(0, len(names), _PER_PROCESS):
                share = names[start : start + _PER_PROCESS]
                self._shares |= dict.fromkeys(share, share)

    def __call__(self, family: str) -> Report:
        """Return a family's report; raises AssertionError where the process that makes it fails."""
        if family not in self._reports:
            share = self._shares[family]
            self._reports |= report_of(_CHECKS, self._folder(share[0]), share, environment=self._environment)
        return self._reports[family]
