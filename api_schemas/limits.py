"""Limits on the size of one request's interventions, checked before anything is resolved or allocated.

They reach the schemas through ``parse_interventions``, as validation context.
"""

from __future__ import annotations

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one request's interventions.

    Attributes:
        max_operations: Operations of one prompt.
        max_request_operations: Operations of all prompts together, where ``max_operations`` is not more.
        max_request_points: Point strings of all operations together.
        max_tensor_bytes: Bytes of one tensor, decoded; numbers in a list count four bytes each.
        max_points_per_op: Point strings in one ``at``, before patterns are expanded.
        max_list_items: Positions, tokens, units, layers or targets in one list.
    """

    max_operations: int = 64
    max_request_operations: int = 2048
    max_request_points: int = 65536
    max_tensor_bytes: int = 64 * 1024 * 1024
    max_points_per_op: int = 1024
    max_list_items: int = 131072


DEFAULT_LIMITS: Final = RequestLimits()
"""The default limits."""
