"""Arguments that all invokes of a trace share, because a single run serves them all."""

from __future__ import annotations

from typing import Any

import torch


class InvokesDifferError(ValueError):
    pass


def join_shared(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the whole run; InvokesDifferError if a later invoke changes one."""
    for name, value in second.items():
        if name not in first or not _same(first[name], value):
            so_far = repr(first[name]) if name in first else "not given"
            raise InvokesDifferError(
                f"{name} applies to all invokes together, which share one run: it was {so_far}, and this "
                f"invoke has {value!r}. Pass it to the trace, or to the first invoke only, or use two traces."
            )
    return first


def without_input(kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """Return the arguments of an empty invoke, with 0 rows; ValueError if it has any."""
    if kwargs:
        raise ValueError(
            "an invoke without an input sees the rows of all others and runs nothing that could take "
            f"{', '.join(kwargs)}; give arguments to the trace, or to an invoke with an input"
        )
    return (), {}, 0


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        is_pair = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
        return is_pair and torch.equal(first, second)
    return first is second or bool(first == second)
