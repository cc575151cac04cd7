"""Changes beyond float16, found on the device and reported with the step's results.

A row whose change float16 cannot hold keeps its value and is marked; its request fails when the results are
delivered, so that no step waits for the device. The other dtypes have the range of float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.plans.records import Failure
from nnsight_engine.plans.sites import LOGITS
from nnsight_engine.plans.step.stage import SiteKey

_FAILURE: Final = Failure(
    "not_finite",
    "what the operation adds is beyond float16, in which the model computes; use a smaller scale, "
    "or serve the model in bfloat16 or float32",
)


class Segment(NamedTuple):
    """Flags of neighbouring rows of one request; the first belongs to row ``offset`` of its span."""

    request_id: str
    start: int
    stop: int
    offset: int = 0


@dataclasses.dataclass(slots=True)
class Overflows:
    """Rows at which a change was beyond float16; ``flags`` are ``[rows of the step + rows with logits]``."""

    flags: torch.Tensor
    segments: list[Segment]
    num_rows: int

    @classmethod
    def of(
        cls, spans: Iterable[Segment], logits_rows: npt.NDArray[np.int64], device: torch.device
    ) -> Overflows:
        of_rows = list(spans)
        num_rows = max(one.stop for one in of_rows)
        of_logits = [
            Segment(one.request_id, num_rows + place, num_rows + place + 1, row - one.start)
            for one in of_rows
            for place, row in enumerate(logits_rows.tolist())
            if one.start <= row < one.stop
        ]
        flags = torch.zeros(num_rows + len(logits_rows), dtype=torch.bool, device=device)
        return cls(flags, of_rows + of_logits, num_rows)

    def at(self, key: SiteKey) -> torch.Tensor:
        return self.flags[self.num_rows :] if key == LOGITS else self.flags[: self.num_rows]


def overflow_failures(
    segments: Sequence[Segment], flags: npt.NDArray[np.bool_], num_kept: Mapping[str, int]
) -> dict[str, Failure]:
    """Return the failures of requests of which a row is marked that is no refused draft (``num_kept``)."""
    if not flags.any():
        return {}
    found = {}
    for request_id, start, stop, offset in segments:
        kept = min(stop, start + num_kept.get(request_id, stop) - offset)
        if flags[start : max(start, kept)].any():
            found[request_id] = _FAILURE
    return found
