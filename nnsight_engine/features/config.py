"""A dictionary's definition: architecture, sizes, scaling of inputs, changes of activations; no tensors."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Final

MAX_FEATURES: Final = 2**21
"""The largest number of features of a dictionary."""


class Architecture(enum.StrEnum):
    STANDARD = "standard"
    TOPK = "topk"
    JUMPRELU = "jumprelu"
    GATED = "gated"
    TRANSCODER = "transcoder"
    SKIP_TRANSCODER = "skip_transcoder"
    JUMPRELU_TRANSCODER = "jumprelu_transcoder"
    JUMPRELU_SKIP_TRANSCODER = "jumprelu_skip_transcoder"

    @property
    def is_transcoder(self) -> bool:
        """Whether it reconstructs the value of another point than the one it reads."""
        return self.endswith("transcoder")

    @property
    def has_threshold(self) -> bool:
        return self.startswith("jumprelu")

    @property
    def has_skip(self) -> bool:
        """Whether a linear map of the input is added to the output."""
        return self.endswith("skip_transcoder")


class Normalization(enum.StrEnum):
    """How inputs are scaled before they are encoded; reconstructions are scaled back."""

    NONE = "none"
    EXPECTED_AVERAGE = "expected_average_only_in"
    LAYER_NORM = "layer_norm"
    CONSTANT_NORM = "constant_norm_rescale"


class Change(enum.StrEnum):
    """How the activation ``a`` of a feature becomes a new one, given a value ``v``."""

    SET = "set"
    ADD = "add"
    SCALE = "scale"
    ABLATE = "ablate"

    @property
    def gain(self) -> tuple[float, float]:
        """The factor on ``a``, as a factor on ``v`` and a constant."""
        return {"set": (0.0, 0.0), "add": (0.0, 1.0), "scale": (1.0, 0.0), "ablate": (0.0, 0.0)}[self]

    @property
    def offset(self) -> float:
        """The factor on ``v`` of what is added."""
        return 1.0 if self in {Change.SET, Change.ADD} else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class DictionaryConfig:
    """The definition of a dictionary, without its numbers.

    ``input_factor`` is the factor of EXPECTED_AVERAGE, ``k`` the number of features that TOPK keeps. With
    ``rescales_by_decoder_norm``, TOPK chooses features by their activation times the norm of their row of
    ``W_dec``; that product is then their activation.
    """

    architecture: Architecture
    input_width: int
    num_features: int
    output_width: int
    normalization: Normalization = Normalization.NONE
    input_factor: float = 1.0
    subtracts_decoder_bias: bool = False
    k: int | None = None
    rescales_by_decoder_norm: bool = False

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        inputs, features, outputs = self.input_width, self.num_features, self.output_width
        shapes: dict[str, tuple[int, ...]] = {
            "W_enc": (inputs, features),
            "W_dec": (features, outputs),
            "b_dec": (outputs,),
        }
        if self.architecture is Architecture.GATED:
            shapes |= dict.fromkeys(("b_gate", "r_mag", "b_mag"), (features,))
        else:
            shapes["b_enc"] = (features,)
        if self.architecture.has_threshold:
            shapes["threshold"] = (features,)
        if self.architecture.has_skip:
            shapes["W_skip"] = (outputs, inputs)
        return shapes

    @property
    def num_values(self) -> int:
        return sum(map(math.prod, self.tensor_shapes.values()))


@dataclasses.dataclass(frozen=True, slots=True)
class StoredDictionary:
    """A dictionary in a file on this machine; ``output_at`` is ``at``, except for a transcoder."""

    config: DictionaryConfig
    at: str
    output_at: str
    sha256: str
    path: str
    dtype: str
