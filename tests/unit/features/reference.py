"""Dictionaries with random numbers, and their definitions row by row in plain numpy, float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.features.config import Architecture, DictionaryConfig, Normalization
from nnsight_engine.features.dictionary import Dictionary

Row = npt.NDArray[np.float64]


def some_config(chance: np.random.Generator, architecture: Architecture, **fields: Any) -> DictionaryConfig:
    width, num_features = int(chance.integers(2, 9)), int(chance.integers(1, 24))
    is_topk = architecture is Architecture.TOPK
    values: dict[str, Any] = {
        "input_width": width,
        "num_features": num_features,
        "output_width": int(chance.integers(1, 9)) if architecture.is_transcoder else width,
        "subtracts_decoder_bias": not architecture.is_transcoder and bool(chance.integers(2)),
        "k": int(chance.integers(1, num_features + 1)) if is_topk else None,
        "rescales_by_decoder_norm": is_topk and bool(chance.integers(2)),
    }
    return DictionaryConfig(architecture, **{**values, **fields})


def some_tensors(
    chance: np.random.Generator, config: DictionaryConfig, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(chance.normal(size=shape)).to(dtype)
        for name, shape in config.tensor_shapes.items()
    }


class Reference:
    """The definition of a dictionary, one row at a time."""

    def __init__(self, dictionary: Dictionary) -> None:
        self.config = dictionary.config
        self.tensors = {name: one.double().numpy() for name, one in dictionary.tensors.items()}

    def scaled(self, x: Row) -> tuple[Row, float, float]:
        """Return the scaled input, and the factor and the summand by which reconstructions go back."""
        match self.config.normalization:
            case Normalization.EXPECTED_AVERAGE:
                return x * self.config.input_factor, 1 / self.config.input_factor, 0.0
            case Normalization.LAYER_NORM:
                mean = sum(x) / len(x)
                deviation = math.sqrt(sum((x - mean) ** 2) / (len(x) - 1))
                return (x - mean) / (deviation + 1e-5), deviation, mean
            case Normalization.CONSTANT_NORM:
                factor = math.sqrt(len(x)) / max(math.sqrt(sum(x**2)), 1e-12)
                return x * factor, 1 / factor, 0.0
            case Normalization.NONE:
                return x, 1.0, 0.0

    def encode(self, x: Row) -> Row:
        own, (scaled, _, _) = self.tensors, self.scaled(x)
        if self.config.subtracts_decoder_bias:
            scaled = scaled - own["b_dec"]
        found = np.zeros(self.config.num_features)
        for feature in range(self.config.num_features):
            hidden = float(scaled @ own["W_enc"][:, feature])
            match self.config.architecture:
                case Architecture.GATED:
                    size = hidden * math.exp(own["r_mag"][feature]) + own["b_mag"][feature]
                    found[feature] = max(0.0, size) if hidden + own["b_gate"][feature] > 0 else 0.0
                case (
                    Architecture.JUMPRELU
                    | Architecture.JUMPRELU_TRANSCODER
                    | Architecture.JUMPRELU_SKIP_TRANSCODER
                ):
                    hidden += own["b_enc"][feature]
                    found[feature] = max(0.0, hidden) if hidden > own["threshold"][feature] else 0.0
                case Architecture.TOPK:
                    hidden += own["b_enc"][feature]
                    found[feature] = hidden * (
                        self.norm(feature) if self.config.rescales_by_decoder_norm else 1
                    )
                case _:
                    found[feature] = max(0.0, hidden + own["b_enc"][feature])
        if self.config.k is not None:
            kept = sorted(range(len(found)), key=lambda feature: -found[feature])[: self.config.k]
            found = np.array([max(0.0, one) if index in kept else 0.0 for index, one in enumerate(found)])
        return found

    def norm(self, feature: int) -> float:
        return math.sqrt(sum(self.tensors["W_dec"][feature] ** 2))

    def direction(self, feature: int, x: Row) -> Row:
        """Return what one unit of a feature adds to the output."""
        row: Row = self.tensors["W_dec"][feature]
        if self.config.rescales_by_decoder_norm:
            row = row / self.norm(feature)
        return row if self.config.architecture.is_transcoder else row * self.scaled(x)[1]

    def reconstruct(self, x: Row) -> Row:
        own, (_, scale, shift) = self.tensors, self.scaled(x)
        if self.config.architecture.is_transcoder:
            scale, shift = 1.0, 0.0
        result: Row = own["b_dec"] * scale + shift
        for feature, activation in enumerate(self.encode(x)):
            result = result + activation * self.direction(feature, x)
        return result + own["W_skip"] @ x if self.config.architecture.has_skip else result
