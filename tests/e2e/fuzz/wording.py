"""What the words of a request name, as docs/interventions.md says: points, places and positions.

Written position by position and apart from the engine's own code, so that the two can disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nnsight_engine.plans.request_plan import AnswerMarkers, Part

Encode = Callable[[str], list[int]]
"""Token ids of a text, without special tokens."""
PARTS = ("content", "reasoning", "tool_calls")


def is_write(operation: dict[str, Any]) -> bool:
    return operation["op"] in {"steer", "ablate", "patch"}


def points(operation: dict[str, Any], num_layers: int) -> list[str]:
    """Return the single points that an operation names, in order."""
    if operation["op"] == "logit_lens":
        return [f"layers.{layer}.output" for layer in lens_layers(operation["layers"], num_layers)]
    at = operation["at"]
    found = []
    for name in [at] if isinstance(at, str) else at:
        if not name.startswith("layers."):
            found.append(name)
            continue
        _, selection, leaf = name.split(".", 2)
        found += [f"layers.{layer}.{leaf}" for layer in _layers(selection, num_layers)]
    return found


def lens_layers(layers: Any, num_layers: int) -> list[int]:
    if layers == "all":
        return list(range(num_layers))
    if isinstance(layers, str):
        return _layers(layers, num_layers)
    return [layer % num_layers for layer in layers]


def _layers(selection: str, num_layers: int) -> list[int]:
    if selection == "*":
        return list(range(num_layers))
    if ":" not in selection:
        return [int(selection) % num_layers]
    start, stop = (int(part) if part else None for part in selection.split(":"))
    return list(range(num_layers))[start:stop]


def place(point: str) -> str:
    """Return the one name of a place that has several: a layer's input is the output before it."""
    if not point.endswith(".input") or point.endswith("mlp.input"):
        return point
    layer = int(point.split(".")[1])
    return f"layers.{layer - 1}.output" if layer else "embed.output"


def answer_parts(token_ids: Sequence[int], prompt_len: int, markers: AnswerMarkers) -> list[str | None]:
    """Return to which part of the answer each position belongs, None for one before the answer's first."""
    part = markers.first
    names: list[str | None] = []
    for position, token in enumerate(token_ids):
        if position < prompt_len and token in markers.turn_ends:
            part = markers.first
        else:
            part = markers.begun_by.get(token, part)
        names.append(None if position < prompt_len - 1 else Part(part).name.lower())
    return names


def names(
    where: dict[str, Any],
    position: int,
    token: int,
    prompt_len: int,
    encode: Encode,
    part: str | None = None,
) -> bool:
    """Return whether a where-clause names a position of this input token, in this part of the answer."""
    is_prompt = position < prompt_len
    if where.get("phase", "all") not in {"all", "prompt" if is_prompt else "generated"}:
        return False
    if "positions" in where and position not in {at_end(p, prompt_len) for p in where["positions"]}:
        return False
    if "range" in where:
        start, stop = where["range"]
        if position < at_end(start, prompt_len):
            return False
        if stop is not None and position >= at_end(stop, prompt_len):
            return False
    if "tokens" in where and token not in token_ids(where["tokens"], encode):
        return False
    if where.get("scope", part) not in {None, part}:
        return False
    exclude = where.get("exclude")
    return exclude is None or not names(exclude, position, token, prompt_len, encode, part)


def at_end(position: int, prompt_len: int) -> int:
    """Return a position counted from the prompt's end as an absolute one."""
    return position + prompt_len if position < 0 else position


def token_ids(tokens: Sequence[int | str], encode: Encode) -> list[int]:
    return [token if isinstance(token, int) else encode(token)[0] for token in tokens]


def may_name_one(
    where: dict[str, Any], ids: list[int], num_positions: int, encode: Encode, markers: AnswerMarkers
) -> bool:
    """Return whether a clause can name any position of a request, whatever tokens will be generated."""
    prompt_len = len(ids)
    parts = answer_parts(ids, prompt_len, markers)
    if any(names(where, p, token, prompt_len, encode, parts[p]) for p, token in enumerate(ids)):
        return True
    # Tokens of which a clause does not speak are all alike; -1 is one of them.
    candidates = {-1, *token_ids(where.get("tokens", []), encode)}
    return any(
        names(where, position, token, prompt_len, encode, part)
        for position in range(prompt_len, num_positions)
        for token in candidates
        for part in PARTS
    )
