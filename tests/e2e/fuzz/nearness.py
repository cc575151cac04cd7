"""Comparison of values, log-probabilities and ranks with expected ones, within rounding."""

from __future__ import annotations

import numpy as np
import torch

from nnsight_engine.core.tensors import tensor_from_bytes
from nnsight_engine.plans.collect.results import CollectedToken, TensorResult


def as_tensor(result: TensorResult) -> torch.Tensor:
    """Return a tensor result as float32 (int64 stays)."""
    if result.dtype == "int64":
        return torch.from_numpy(np.frombuffer(result.data, np.int64).copy()).reshape(result.shape)
    return tensor_from_bytes(result.dtype, result.shape, result.data).float()


def reduced(rows: torch.Tensor, reduce: str) -> torch.Tensor:
    """Return rows as a capture's `reduce` makes one of them."""
    match reduce:
        case "mean":
            return rows.mean(dim=0)
        case "last":
            return rows[-1]
        case _:
            return rows


def rows_faults(
    what: str, got: torch.Tensor, wanted: torch.Tensor, bound: float, rounding: float
) -> list[str]:
    """Return whether values have another shape than wanted, or a row is off by more than is allowed.

    A row may be off, in its norm, by the bound, and beside that by the rounding of the dtype in which it
    came, a part of the row's norm.
    """
    if got.numel() != wanted.numel():
        return [f"{what} has shape {tuple(got.shape)}, not of {wanted.numel()} numbers"]
    if not torch.isfinite(got).all():
        return [f"{what} is not finite"]
    wanted = wanted.reshape(got.shape)
    rows, others = (x.reshape(-1, x.shape[-1]) for x in (got, wanted))
    off = (rows - others).norm(dim=-1)
    worst = int((off - bound - 2 * rounding * others.norm(dim=-1)).argmax())
    allowed = bound + 2 * rounding * float(others[worst].norm())
    if float(off[worst]) <= allowed:
        return []
    return [
        (
            f"row {worst} of {what} is off by {float(off[worst]):.4g}, of a norm of "
            f"{float(others[worst].norm()):.4g}; {allowed:.3g} is allowed"
        )
    ]


def top_faults(top: list[CollectedToken], logprobs: torch.Tensor, top_k: int, slack: float) -> list[str]:
    """Return what is wrong with a lens' likeliest tokens, whose log-probabilities may be off by ``slack``."""
    if len({token.id for token in top}) != top_k:
        return [f"the likeliest are {[token.id for token in top]}, not {top_k} different tokens"]
    best = logprobs.topk(top_k).values if top_k else logprobs[:0]
    found = []
    for place, token in enumerate(top):
        off = abs(token.logprob - float(logprobs[token.id]))
        if off > slack or float(best[place]) - float(logprobs[token.id]) > 2 * slack:
            found.append(
                f"number {place} is {token.id} with {token.logprob:.4f}, not {float(best[place]):.4f}"
            )
    return found


def target_faults(targets: list[CollectedToken], logprobs: torch.Tensor, slack: float) -> list[str]:
    """Return what is wrong with a lens' targets, whose ranks hold as far as ``slack`` separates tokens."""
    found = []
    for token in targets:
        own = float(logprobs[token.id])
        least, most = int((logprobs > own + 2 * slack).sum()) + 1, int((logprobs > own - 2 * slack).sum())
        if abs(token.logprob - own) > slack:
            found.append(f"target {token.id} has {token.logprob:.4f}, not {own:.4f}")
        if token.rank is None or not least <= token.rank <= max(least, most):
            found.append(f"target {token.id} has rank {token.rank}, not {least} to {most}")
    return found
