"""What one engine computes for a certificate, and its form in files.

A measurement is a tensor, or the failure in its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import load_file, save_file

from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.core.errors import InterventionError, UnsupportedOptionError
from nnsight_engine.envoys.architectures.errors import (
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
        found = self.tensors.get(key)
        return self.facts.failures.get(key) if found is None else found

    def save(self, folder: Path) -> None:
        save_file({key: value.contiguous() for key, value in self.tensors.items()}, folder / _TENSORS)
        (folder / _FACTS).write_bytes(msgspec.json.encode(self.facts))

    @classmethod
    def load(cls, folder: Path) -> Reference:
        facts = msgspec.json.decode((folder / _FACTS).read_bytes(), type=ReferenceFacts)
        return cls(facts, load_file(folder / _TENSORS))


def measured(measure: Callable[..., torch.Tensor], *args: Any, **options: Any) -> Measurement:
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
        return {name: measured(lambda one: measure([one])[one], name) for name in names}
