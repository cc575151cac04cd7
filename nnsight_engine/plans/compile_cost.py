"""Bytes of results that a read of the prompt is sure to need, counted before anything runs."""

from __future__ import annotations

from typing import Final

from nnsight_engine.core.dtypes import ITEM_BYTES
from nnsight_engine.core.model_spec import LeafSpec, ModelSpec
from nnsight_engine.plans.compile_sites import leaf_of
from nnsight_engine.plans.request_plan import Kind, PlannedOp

_PAIR_BYTES: Final = 8
"""A lens result's token: an id or a rank, and a log-probability, four bytes each."""


def prompt_bytes(op: PlannedOp, num_prompt: int, spec: ModelSpec) -> int:
    """Return the bytes of the operation's results over the prompt.

    Args:
        op: The operation; writes need none.
        num_prompt: Positions of the prompt that it names.
        spec: The model's description.
    """
    match op.kind:
        case Kind.CAPTURE:
            # A mean is kept in float32; a reduced capture is one row however many positions it has.
            num_rows = num_prompt if op.reduce == "none" else min(num_prompt, 1)
            item_bytes = ITEM_BYTES["float32" if op.reduce == "mean" else op.dtype]
            width = sum(_width(leaf_of(site, spec), num_prompt) for site in op.sites)
            return num_rows * width * item_bytes
        case Kind.PROBE:
            return num_prompt * len(op.sites) * ITEM_BYTES["float32"]
        case Kind.LENS:
            return num_prompt * len(op.sites) * (op.top_k + len(op.targets)) * _PAIR_BYTES
        case _:
            return 0


def _width(leaf: LeafSpec, num_prompt: int) -> int:
    """Return the flat width; an axis that grows with the position counts at its least, on average half."""
    if -1 not in leaf.shape:
        return leaf.width
    return abs(leaf.width) * max(1, num_prompt // 2)
