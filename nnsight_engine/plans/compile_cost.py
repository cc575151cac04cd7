"""Lower bound on the bytes of a request's results over its prompt, computed before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nnsight_engine.core.dtypes import ITEM_BYTES
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.compile_sites import leaf_of
from nnsight_engine.plans.compile_where import Named
from nnsight_engine.plans.request_plan import OperationKind, PlannedOp
from nnsight_engine.plans.where import last_position

_PAIR_BYTES: Final = 8
"""Bytes of a token in a lens result: an id or a rank, and a log-probability, four bytes each."""


def prompt_bytes(op: PlannedOp, named: Named, spec: ModelSpec) -> int:
    """Return the bytes of the operation's results over the prompt.

    Args:
        op: The operation; writes need none.
        named: The prompt positions that its rule matches.
        spec: The model's description.
    """
    num_prompt = named.num_prompt
    match op.kind:
        case OperationKind.CAPTURE:
            # A mean is kept in float32; a reduced capture is one row for any number of positions.
            num_rows = num_prompt if op.reduce == "none" else min(num_prompt, 1)
            item_bytes = ITEM_BYTES["float32" if op.reduce == "mean" else op.dtype]
            width = sum(leaf_of(site, spec).width for site in op.sites)
            if op.captures_patterns:
                # Every row is padded to the length of the last, with one number per key.
                width *= named.last_prompt + 1
            return num_rows * width * item_bytes
        case OperationKind.PROBE:
            return num_prompt * len(op.sites) * ITEM_BYTES["float32"]
        case OperationKind.LENS:
            return num_prompt * len(op.sites) * (op.top_k + len(op.targets)) * _PAIR_BYTES
        case _:
            return 0


def key_bytes(ops: Sequence[PlannedOp], prompt_len: int, spec: ModelSpec) -> int:
    """Return the bytes of the prompt's keys that the worker stores for attention pattern captures.

    Args:
        ops: All operations of the request; those at one layer share its keys.
        prompt_len: Tokens of the prompt.
        spec: The model's description.
    """
    leaf = spec.leaf("attn.k")
    if leaf is None:
        return 0
    num_keys: dict[int, int] = {}
    for op in ops:
        if not op.captures_patterns:
            continue
        last = last_position(op.where, prompt_len)
        needed = prompt_len if last is None else min(prompt_len, last + 1)
        for site in op.sites:
            num_keys[site.layer] = max(num_keys.get(site.layer, 0), needed)
    return sum(num_keys.values()) * leaf.width * ITEM_BYTES[spec.dtype]
