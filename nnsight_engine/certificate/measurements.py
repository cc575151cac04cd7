"""What one engine computes for a certificate, and its form in files.

A measurement is a tensor, or the failure in its place.

The blocks of a certificate: the same code on ``LanguageModel`` and on ``VLLM``.

A change is added at every position but the first, since the same addition to all keys would change no
attention. At ``logits`` it is added at the last position, the only one that vLLM computes. Writes and skips
return the logits of the last position, float32 ``[vocabulary]``. Options are those of ``trace``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import load_file, save_file

from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.core.errors import InterventionError, UnsupportedOptionError
from nnsight_engine.core.saves import save
from nnsight_engine.envoys.architectures.named_points import (
    NoStandardPointsError,
    PatternError,
    PointValueError,
    UnknownPointError,
)
from nnsight_engine.vllm_backend.traces.errors import SeveralStreamsError

LOGITS: Final = "logits"
DEFAULT_PROMPT: Final = "The Eiffel Tower is in the city of"
_REFUSALS: Final = (
    ApiError,
    InterventionError,
    NoStandardPointsError,
    PatternError,
    PointValueError,
    SeveralStreamsError,
    UnknownPointError,
    UnsupportedOptionError,
)
_BROKEN: Final = frozenset({ErrorCode.INTERNAL, ErrorCode.INTERVENTION_FAILED})
"""Codes of errors that are no refusal: the engine could not do what it had accepted."""
_TENSORS: Final = "reference.safetensors"
_FACTS: Final = "reference.json"
_MAX_MESSAGE: Final = 300

Report = Callable[[str, int, int], None]
"""Receives the progress: what is being done, the number of steps done, and of all steps."""


class CertificateError(Exception):
    """The check of a model cannot be carried out; the message has the reason and the next step."""


class Failure(msgspec.Struct, frozen=True):
    """Why there is no value: an error's first line, and whether the engine refused with a typed error."""

    message: str
    is_refusal: bool

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure that an error is, told by its first line."""
        lines = str(error).strip().splitlines() or [""]
        code = str(getattr(error, "code", ""))
        return cls(
            f"{type(error).__name__}: {lines[0]}"[:_MAX_MESSAGE],
            is_refusal=isinstance(error, _REFUSALS) and code not in _BROKEN,
        )


Measurement = torch.Tensor | Failure
Measurements = Mapping[str, Measurement]


class CheckRequest(msgspec.Struct, frozen=True):
    """What is compared.

    Attributes:
        model: A folder or a name on the hub.
        layers: Such as ``0,4:6,-1`` or ``*``; None for the first, the middle and the last of each kind.
        seed: Seed of the changes that are written.
        num_tokens: Number of tokens generated without interventions.
        device: Device of transformers' model.
        tolerance: The largest relative difference of equal values; None for that of vLLM's dtype.
    """

    model: str
    prompt: str = DEFAULT_PROMPT
    layers: str | None = None
    seed: int = 0
    num_tokens: int = 6
    revision: str | None = None
    trust_remote_code: bool = False
    device: str = "cpu"
    tolerance: float | None = None


class ReferenceFacts(msgspec.Struct):
    """What describes a reference, without tensors.

    Attributes:
        num_layers: Number of layers; 0 if the model has no standard points.
        layers: The layers that are compared.
        points: The points that transformers has, in the order in which the model computes them.
        tokens: The greedy continuation.
        failures: Failures by measurement.
    """

    architecture: str
    prompt_ids: list[int]
    num_layers: int
    layers: list[int]
    points: list[str]
    tokens: list[int]
    failures: dict[str, Failure]


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """What transformers computes, in float32.

    Measurements have the keys ``plain``, logits ``[tokens, vocabulary]`` from which the continuation was
    chosen; ``value POINT``, as ``blocks.read`` returns it; ``change POINT``, what is added there, of the
    point's shape; ``write POINT`` and ``skip LAYER``, the logits ``[vocabulary]`` of the last position with
    that change, or with that layer skipped.
    """

    facts: ReferenceFacts
    tensors: Mapping[str, torch.Tensor]

    def get(self, key: str) -> Measurement | None:
        """Return a measurement; None if it was not made."""
        tensor = self.tensors.get(key)
        return self.facts.failures.get(key) if tensor is None else tensor

    def save(self, folder: Path) -> None:
        save_file({key: value.contiguous() for key, value in self.tensors.items()}, folder / _TENSORS)
        (folder / _FACTS).write_bytes(msgspec.json.encode(self.facts))

    @classmethod
    def load(cls, folder: Path) -> Reference:
        facts = msgspec.json.decode((folder / _FACTS).read_bytes(), type=ReferenceFacts)
        return cls(facts, load_file(folder / _TENSORS))


def measured(measure: Callable[..., torch.Tensor], *args: Any, **options: Any) -> Measurement:
    """Return what ``measure`` returns, or its error as a ``Failure``."""
    try:
        return measure(*args, **options)
    except Exception as error:  # noqa: BLE001 - whatever it is, the certificate says it
        return Failure.of(error)


def all_measured(
    names: list[str], measure: Callable[[list[str]], Mapping[str, torch.Tensor]]
) -> dict[str, Measurement]:
    """Measure several points at once; if that fails, one by one, so that one failure hides no value."""
    try:
        return dict(measure(names))
    except Exception:  # noqa: BLE001 - the failures of single points say which it was
        return {
            name: measured(lambda measured_name: measure([measured_name])[measured_name], name)
            for name in names
        }


def read(model: Any, prompt: Any, names: Sequence[str], **options: Any) -> dict[str, torch.Tensor]:
    """Return points, float32 ``[tokens, *shape]``; patterns are ``[heads, tokens, keys]``.

    States and logits are those at the last position only, states without an axis for it.
    """
    with model.trace(prompt, **options):
        values: dict[str, torch.Tensor] = save({})
        for name in names:
            value = model.points[name]
            values[name] = value[..., -1:, :].clone() if name == LOGITS else value.clone()
    is_batched = isinstance(prompt, torch.Tensor)  # as on ``LanguageModel``
    return {name: _on_host(value[0] if is_batched else value) for name, value in values.items()}


def write_in_place(model: Any, prompt: Any, name: str, change: torch.Tensor, **options: Any) -> torch.Tensor:
    """Add ``change`` in place at all positions but the first (logits: the last); return the last logits."""
    axis = -1 - change.ndim
    with model.trace(prompt, **options):
        value = model.points[name]
        first_position = value.shape[axis] - 1 if name == LOGITS else 1
        value.narrow(axis, first_position, value.shape[axis] - first_position).add_(change.to(value))
        logits = model.points[LOGITS][..., -1, :].clone().save()
    return _on_host(logits).flatten()


def assign(model: Any, prompt: Any, name: str, change: torch.Tensor, **options: Any) -> torch.Tensor:
    """Do as ``write_in_place`` does, but assign a changed copy to the point."""
    axis = -1 - change.ndim
    with model.trace(prompt, **options):
        value = model.points[name].clone()
        first_position = value.shape[axis] - 1 if name == LOGITS else 1
        value.narrow(axis, first_position, value.shape[axis] - first_position).add_(change.to(value))
        model.points[name] = value
        logits = model.points[LOGITS][..., -1, :].clone().save()
    return _on_host(logits).flatten()


def num_returned(model: Any, prompt: Any, layer: int) -> int:
    """Return the number of items that a transformers layer returns; 0 if it returns one tensor."""
    with model.trace(prompt):
        output = model.layers[layer].output
        number: int = save(len(output) if isinstance(output, tuple) else 0)
    return number


def skip(model: Any, prompt: Any, layer: int, *, num_items: int = 0, **options: Any) -> torch.Tensor:
    """Skip a layer, whose output is then its input.

    The input takes the place of ``num_items`` items, of which all but the first are None; 0 for the tensor
    alone.
    """
    with model.trace(prompt, **options):
        block = model.layers[layer]
        block.skip((block.input, *[None] * (num_items - 1)) if num_items else block.input)
        logits = model.points[LOGITS][..., -1, :].clone().save()
    return _on_host(logits).flatten()


def _on_host(value: torch.Tensor) -> torch.Tensor:
    return value.detach().float().cpu()
