"""The thresholds that a run must meet, read from a file: see ``thresholds.toml``.

Machines differ, so most thresholds are ratios within the run: to plain requests of the same phase, or to the
same requests in another phase. A threshold for a kind or a phase that the run does not have is skipped, and
one for a kind or a phase that no run has is rejected; a missing value counts as missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from loadtests.run_spec import HOSTILE, PHASES, TENANT_OF
from loadtests.summary import ALL_MEASURES, Summary, SummaryRow, Verdict

DEFAULT_FILE: Final = Path(__file__).with_name("thresholds.toml")
_ANY: Final = "*"
_POLITE: Final = "*polite"


class ThresholdError(Exception):
    """An invalid file of thresholds; the message says why."""


class Threshold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One threshold.

    Attributes:
        measure: One of ``summary.ALL_MEASURES``.
        most: The largest allowed value or ratio.
        least: The smallest allowed value or ratio.
        kind: The kind of requests; ``*`` for all, ``*polite`` for all but the hostile tenant's.
        phase: The phase; ``*`` for all.
        of_kind: If given, the measure is divided by that of this kind.
        of_phase: If given, the measure is divided by that of this phase.
    """

    measure: str
    most: float | None = None
    least: float | None = None
    kind: str = _ANY
    phase: str = _ANY
    of_kind: str = ""
    of_phase: str = ""

    def __post_init__(self) -> None:
        """Validate what the types do not express."""
        kinds = tuple(TENANT_OF)
        for field, names in (
            ("measure", ALL_MEASURES),
            ("kind", (_ANY, _POLITE, *kinds)),
            ("phase", (_ANY, *PHASES)),
            ("of_kind", ("", *kinds)),
            ("of_phase", ("", *PHASES)),
        ):
            given = getattr(self, field)
            if given not in names:
                allowed = ", ".join(filter(None, names))
                raise ValueError(f"`{field}` must be one of {allowed}, got {given!r}")
        if self.most is None and self.least is None:
            raise ValueError(f"the threshold of {self.measure} needs `most` or `least`")

    def verdicts(self, summary: Summary) -> Iterator[Verdict]:
        """Yield the result for each row that the threshold applies to."""
        for row in summary.rows:
            if self._is_for(row) and not self._is_itself(row):
                base = self._base(summary, row)
                if base is not None:
                    yield self._verdict(row, base)

    def _is_for(self, row: SummaryRow) -> bool:
        is_kind = self.kind in {_ANY, row.kind} or (self.kind == _POLITE and row.kind not in HOSTILE)
        return is_kind and self.phase in {_ANY, row.phase}

    def _is_itself(self, row: SummaryRow) -> bool:
        """Return whether a row would be divided by itself."""
        has_base = bool(self.of_kind or self.of_phase)
        return has_base and (self.of_kind or row.kind, self.of_phase or row.phase) == (row.kind, row.phase)

    def _base(self, summary: Summary, row: SummaryRow) -> SummaryRow | None:
        return summary.row(self.of_kind or row.kind, self.of_phase or row.phase)

    def _verdict(self, row: SummaryRow, base: SummaryRow) -> Verdict:
        value = row.measure(self.measure) if row.num_requests else None
        rule = f"{row.kind}, {row.phase}: {self.measure}"
        if base is not row:
            below = base.measure(self.measure)
            value = value / below if value is not None and below else None
            rule += f" / that of {base.kind}, {base.phase}"
        rule += "".join(
            f" {sign} {bound:g}" for sign, bound in (("≤", self.most), ("≥", self.least)) if bound is not None
        )
        return Verdict(rule=rule, value=value, is_kept=value is not None and self._allows(value))

    def _allows(self, value: float) -> bool:
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    threshold: list[Threshold] = []


def read(path: Path) -> list[Threshold]:
    """Read the thresholds from a file.

    Raises:
        ThresholdError: The file cannot be read or is invalid.
    """
    try:
        return msgspec.toml.decode(path.read_bytes(), type=_File).threshold
    except (OSError, msgspec.DecodeError) as error:
        raise ThresholdError(f"the thresholds in {path} cannot be read: {error}") from error


def judged(summary: Summary, thresholds: list[Threshold]) -> Summary:
    """Return the summary with the results of the thresholds."""
    verdicts = [verdict for threshold in thresholds for verdict in threshold.verdicts(summary)]
    return msgspec.structs.replace(summary, verdicts=verdicts)


__all__ = ["DEFAULT_FILE", "Threshold", "ThresholdError", "judged", "read"]
