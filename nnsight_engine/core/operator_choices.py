"""The operator's choices: how code of untrusted keys runs, and which taps are compiled into the model.

Each tap adds a small cost to every step, used or not; hooks in uncompiled steps serve the other points.
"""

from __future__ import annotations

from typing import Final

from api_schemas.errors import ApiError
from api_schemas.points import VISION, PointPattern
from nnsight_engine.core.errors import UnsupportedOptionError

PROCESS: Final = "process"
"""Each trace runs in a process of its own."""
OFF: Final = "off"
"""Code runs in the engine, like that of trusted keys."""


def check_sandbox(value: str) -> None:
    """Raise UnsupportedOptionError unless the choice is ``process`` or ``off``."""
    if value not in {PROCESS, OFF}:
        raise UnsupportedOptionError(f"the sandbox is {PROCESS!r} or {OFF!r}, got {value!r}")


ALL_TAPS: Final = "all"
NO_TAPS: Final = "off"
_EMBED: Final = "embed.output"
_OFFSETS: Final = {"input": 0, "output": 1}


def check_taps(text: str) -> None:
    """Raise UnsupportedOptionError if the syntax is wrong, before a model is loaded."""
    _patterns(text)


def chosen_taps(text: str, num_layers: int) -> frozenset[int]:
    """Return the numbers of the chosen taps: 0 before the first layer, i + 1 after layer i.

    ``text`` is ``all``, ``off``, or points such as ``layers.4:20.output``, separated by commas;
    UnsupportedOptionError if it names no taps of this model.
    """
    if text == ALL_TAPS:
        return frozenset(range(num_layers + 1))
    try:
        points = [point for pattern in _patterns(text) for point in pattern.resolve(num_layers)]
    except ApiError as error:
        raise UnsupportedOptionError(f"--taps {text}: {error.message}") from None
    taps = (tap_of(point.leaf, point.layer) for point in points)
    return frozenset(tap for tap in taps if tap is not None)


def tap_of(leaf: str, layer: int) -> int | None:
    """Return the tap at a point, or None; images' rows are a part of the first layer's input."""
    if leaf in {_EMBED, VISION}:
        return 0
    return layer + _OFFSETS[leaf] if leaf in _OFFSETS else None


def _patterns(text: str) -> list[PointPattern]:
    """Return the points that a choice of taps names, none for ``all`` and ``off``; see ``check_taps``."""
    if text in {ALL_TAPS, NO_TAPS}:
        return []
    try:
        patterns = [PointPattern.parse(part.strip()) for part in text.split(",")]
    except ApiError as error:
        raise UnsupportedOptionError(f"--taps {text}: {error.message}") from None
    for pattern in patterns:
        if pattern.leaf not in (_OFFSETS if pattern.layers is not None else {_EMBED}):
            raise UnsupportedOptionError(
                f"--taps {text}: taps lie in the residual stream, at `embed.output`, `layers.3.output` or "
                f"`layers.4:20.output`, not at `{pattern.leaf}`; or use `{ALL_TAPS}` or `{NO_TAPS}`"
            )
    return patterns
