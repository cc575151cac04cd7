"""Checks of a new preset: its operations on this model, as far as that needs no prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from api_schemas.detectors import DetectorUsed
from api_schemas.dictionaries import DictionaryUsed
from api_schemas.interventions import Intervention, Operation
from api_schemas.operation_names import (
    condition_tests,
    detectors_used,
    dictionaries_used,
    features_named,
    vectors_used,
)
from api_schemas.operations import LogitLens, Patch
from api_schemas.request_traces import Trace
from api_schemas.tensors import VectorUsed
from api_schemas.where import Where
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.compile.request import compile_request
from nnsight_engine.plans.compile.tensors import read_tensor
from nnsight_engine.plans.prompt_media import PromptMedia


def check_fit(operations: Sequence[Intervention], spec: ModelSpec) -> None:
    """Compile operations with resolved names for a made-up prompt with every position; raises ApiError."""
    declared = [one for one in operations if not isinstance(one, Trace)]
    # Each operation has an image of its own, of as many positions as it may need.
    sizes = [_num_positions(one) for one in declared]
    compile_request(
        [_anywhere(one, index) for index, one in enumerate(declared)],
        spec=spec,
        prompt_token_ids=[0] * max(sizes, default=1),
        media=PromptMedia(tuple(((0, size),) for size in sizes)),
        max_tokens=2,
        token_of=lambda _: 0,
        stream=False,
    )


def _num_positions(operation: Operation) -> int:
    if not isinstance(operation, Patch):
        return 1
    if operation.where.images is None:
        return len(operation.where.positions or ())
    shape = read_tensor(operation.values, "interventions").shape
    return shape[-2] if len(shape) > 1 else 1


def _anywhere(operation: Operation, image: int) -> Operation:
    """Return an operation without the parts that depend on the prompt or the tokenizer."""
    if isinstance(operation, Patch):
        positions = list(range(len(operation.where.positions or ())))
        where = Where(positions=positions) if operation.where.images is None else Where(images=[image])
        # Positions of the made-up prompt say nothing about what its condition may read.
        return operation.model_copy(update={"where": where, "when": None})
    if isinstance(operation, LogitLens):
        return operation.model_copy(update={"where": Where(), "targets": None})
    # A condition may read too late for positions of a prompt.
    is_generated = bool(condition_tests(operation)) and operation.where.phase != "prompt"
    return operation.model_copy(update={"where": Where(phase="generated") if is_generated else Where()})


def used_vectors(operations: Sequence[Intervention]) -> list[VectorUsed]:
    return [used for operation in operations for used in vectors_used(operation).values()]


def used_detectors(operations: Sequence[Intervention]) -> list[DetectorUsed]:
    return [used for operation in operations for used in detectors_used(operation).values()]


def used_dictionaries(operations: Sequence[Intervention]) -> list[DictionaryUsed]:
    return [used for operation in operations for used in dictionaries_used(operation).values()]


def pinned(raw: Sequence[dict[str, Any]], operations: Sequence[Intervention]) -> list[dict[str, Any]]:
    """Return operations as sent (``raw``), with names that mean the same for everybody, at any time.

    Names have a version and an id, and features are ids, since labels can be replaced.
    """
    found = []
    for sent, operation in zip(raw, operations, strict=True):
        changed: Any = sent
        named: dict[str, VectorUsed | DetectorUsed | DictionaryUsed] = {
            **vectors_used(operation),
            **detectors_used(operation),
            **dictionaries_used(operation),
        }
        for path, used in named.items():
            name = {"name": f"{used.name}@{used.version}", "id": used.id}
            changed = _updated(changed, path.split("."), name)
        for path, feature in features_named(operation).items():
            changed = _updated(changed, path.split("."), feature)
        found.append(changed)
    return found


def _updated(value: Any, path: Sequence[str], new: Any) -> Any:
    """Return a JSON value with another one at a path; fields of an object are updated, and stay otherwise."""
    if not path:
        return {**value, **new} if isinstance(value, dict) and isinstance(new, dict) else new
    key, *rest = path
    if isinstance(value, list):
        place = int(key)
        return [*value[:place], _updated(value[place], rest, new), *value[place + 1 :]]
    return {**value, key: _updated(value[key], rest, new)}


__all__ = ["check_fit", "pinned", "used_detectors", "used_dictionaries", "used_vectors"]
