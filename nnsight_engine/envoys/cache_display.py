"""HTML display of a cache: a line per module, values by type and shape."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

_MAX_ITEMS: Final = 8
_MAX_CALLS: Final = 16


def cache_html(title: str, kept: Mapping[str, Mapping[str, Sequence[Any]]]) -> str:
    modules = "".join(_module(path, values) for path, values in kept.items())
    return (
        '<div style="font-family: monospace; white-space: pre-wrap">'
        f'<details open><summary>{html.escape(title)}</summary><div style="padding-left: 2em">{modules}</div>'
        "</details></div>"
    )


def _module(path: str, values: Mapping[str, Sequence[Any]]) -> str:
    lines = [line for key, calls in values.items() for line in _lines(key, calls)]
    inner = "".join(f"<div>{html.escape(line)}</div>" for line in lines)
    return (
        f"<details><summary>{html.escape(path)}</summary>"
        f'<div style="padding-left: 2em">{inner}</div></details>'
    )


def _lines(key: str, calls: Sequence[Any]) -> list[str]:
    if len(calls) == 1:
        return [f"{key}: {outline(calls[0])}"]
    shown = [f"{key}, call {number}: {outline(value)}" for number, value in enumerate(calls[:_MAX_CALLS])]
    more = len(calls) - _MAX_CALLS
    return [*shown, f"{key}: {more} more calls"] if more > 0 else shown


def outline(value: Any) -> str:
    """Return a short description of a value, tensors by shape: ``(bfloat16[1, 5, 64], None)``."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple | list):
        items = [outline(one) for one in value[:_MAX_ITEMS]] + ["…"] * (len(value) > _MAX_ITEMS)
        return f"({', '.join(items)})" if isinstance(value, tuple) else f"[{', '.join(items)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {outline(one)}" for key, one in value.items()) + "}"
    return "None" if value is None else type(value).__name__
