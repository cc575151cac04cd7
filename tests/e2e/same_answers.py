"""Compares the answers of two engines: tokens and positions exactly, numbers and rankings within rounding.

In a ranking, tokens or features whose values are nearly equal may have changed places; a target's rank may be
off by one. ``fuzz.judge`` compares ranks with those that the logits give.

Answers are as ``encoded`` writes and ``decoded`` reads them: dataclasses' fields as dictionaries, arrays as
lists, a lens and features row by row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch

from nnsight_engine.core.tensors import tensor_from_bytes
from nnsight_engine.plans.collect.results import CollectedFeatures, LensRows
from tests.e2e.fuzz.judge import ROUNDING
from tests.e2e.fuzz.player import Answer

TOLERANCE: Final = 1e-4
"""How far numbers may differ, as a part of the largest beside them, or of 1 if that is larger."""
CHUNKED_TRACE: Final = "chunked_trace"
ONE_STEP: Final = "needs the whole prompt in one step"
"""Errors of requests that need their prompt in one step, which not every engine computes so."""
_OF_THE_STEPS: Final = frozenset(
    {
        "cached_tokens",
        "recomputed_tokens",
        "drafted_rows",
        "refused_rows",
        "recomputed",
        "cached",
        "drafted",
        "refused",
        "tier",
        "was_split",
    }
)
"""What is said about the steps, which differ between engines."""


_TENSOR: Final = {"dtype", "shape", "data"}
_TOKEN: Final = {"id", "logprob", "rank"}
Ranking = list[tuple[int, float]]


def encoded(answers: Sequence[Answer]) -> bytes:
    return msgspec.msgpack.encode(_plain(answers))


def _plain(value: Any) -> Any:
    if isinstance(value, LensRows):
        return [[[token._asdict() for token in tokens] for tokens in row] for row in value.rows()]
    if isinstance(value, CollectedFeatures):
        return {"name": value.name, "positions": value.positions, "rows": list(value.rows())}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if dataclasses.is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def decoded(data: bytes) -> list[dict[str, Any]]:
    return msgspec.msgpack.decode(data, strict=False, type=list[dict[str, Any]])


def differences_between(got: object, wanted: object) -> list[str]:
    """Return in what dataclasses of answers differ from others."""
    one, other = (msgspec.msgpack.decode(msgspec.msgpack.encode(_plain(value))) for value in (got, wanted))
    return list(_differences("answer", one, other))


def differences(got: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return in what an answer differs from another, or nothing where one of them had to be an error."""
    if had_to_fail(got) or had_to_fail(wanted):
        return []
    return list(_differences("answer", got, wanted))


def had_to_fail(answer: dict[str, Any]) -> bool:
    """Return whether a request failed that needs its prompt in one step, and whose prompt took several."""
    code, message = answer["error"] or ("", "")
    return answer["was_split"] and (code == CHUNKED_TRACE or ONE_STEP in message)


def _differences(path: str, got: Any, wanted: Any) -> Iterator[str]:
    if (one := _ranking(got)) and (other := _ranking(wanted)):
        shorter, longer = sorted((one, other), key=len)
        if isinstance(got, dict) and len(shorter) + 1 == len(longer) and longer[0][1] == longer[-1][1]:
            # The chosen token, the first, ties with the last: it is in one ranking, and beside the other.
            shorter.append(shorter[-1])
        yield from _of_rankings(path, one, other)
    elif isinstance(got, dict) and isinstance(wanted, dict) and got.keys() == wanted.keys():
        yield from _of_fields(path, got, wanted)
    elif isinstance(got, list) and isinstance(wanted, list) and len(got) == len(wanted):
        if all(isinstance(number, float) for number in [*got, *wanted]):
            yield from _of_numbers(path, torch.tensor(got), torch.tensor(wanted), TOLERANCE)
            return
        for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
            yield from _differences(f"{path}[{index}]", one, other)
    elif isinstance(got, float) and isinstance(wanted, float):
        yield from _of_numbers(path, torch.tensor([got]), torch.tensor([wanted]), TOLERANCE)
    elif got != wanted:
        yield f"{path} is {str(got)[:200]}, not {str(wanted)[:200]}"


def _of_fields(path: str, got: dict[Any, Any], wanted: dict[Any, Any]) -> Iterator[str]:
    if got.keys() == _TENSOR:
        yield from _of_tensors(path, got, wanted)
        return
    if got.keys() == _TOKEN and got["rank"] and wanted["rank"] and abs(got["rank"] - wanted["rank"]) == 1:
        got = got | {"rank": wanted["rank"]}
    for key in got.keys() - _OF_THE_STEPS:
        yield from _differences(f"{path}.{key}", got[key], wanted[key])


def _ranking(value: Any) -> Ranking:
    """Return the ids and the values of a ranking: log-probabilities, a lens' top tokens, or features."""
    if isinstance(value, dict):
        is_ranking = all(isinstance(key, int) and isinstance(item, float) for key, item in value.items())
        return list(value.items()) if is_ranking else []
    if not isinstance(value, list):
        return []
    if all(isinstance(token, dict) and token.keys() == _TOKEN and token["rank"] is None for token in value):
        return [(token["id"], token["logprob"]) for token in value]
    pairs = all(isinstance(pair, list) and [type(part) for part in pair] == [int, float] for pair in value)
    return [(feature, activation) for feature, activation in value] if pairs else []


def _of_rankings(path: str, got: Ranking, wanted: Ranking) -> Iterator[str]:
    """Yield what is wrong with a ranking: a value, or a member that others do not nearly equal."""
    if len(got) != len(wanted):
        yield f"{path} ranks {len(got)}, not {len(wanted)}"
        return
    mine, theirs = dict(got), dict(wanted)
    allowed = TOLERANCE * max(1.0, *map(abs, theirs.values()))
    for member in mine.keys() | theirs.keys():
        value, other = mine.get(member, got[-1][1]), theirs.get(member, wanted[-1][1])
        if not abs(value - other) <= allowed:
            yield f"{path} has {member} with {value:.6g}, not {other:.6g}"
    for place, ((member, value), (other, wanted_value)) in enumerate(zip(got, wanted, strict=True)):
        if not abs(value - wanted_value) <= allowed:
            yield f"{path} has {member} in place {place}, not {other}"


def _of_tensors(path: str, got: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    kind, shape = got["dtype"], got["shape"]
    if (kind, shape) != (wanted["dtype"], wanted["shape"]):
        yield f"{path} is {kind} {shape}, not {wanted['dtype']} {wanted['shape']}"
    elif kind == "int64":
        if got["data"] != wanted["data"]:
            yield f"{path} has other integers"
    else:
        rounding = 0.0 if kind == "float32" else 2 * ROUNDING[kind]
        one, other = (tensor_from_bytes(kind, shape, tensor["data"]).float() for tensor in (got, wanted))
        yield from _of_numbers(path, one, other, TOLERANCE + rounding)


def _of_numbers(path: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> Iterator[str]:
    if not wanted.numel():
        return
    off = float((got - wanted).abs().max())
    allowed = tolerance * max(1.0, float(wanted.abs().max()))
    if not off <= allowed:
        yield f"{path} is off by {off:.3g}; {allowed:.3g} is allowed"
