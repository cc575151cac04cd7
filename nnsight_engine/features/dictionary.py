"""The maths of a dictionary, in float32 whatever dtype the weights have; rows are independent of each other.

Methods that would need ``[rows, num_features]`` at once only to reduce it work in parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import torch

from nnsight_engine.features.config import Architecture, Change, DictionaryConfig, Normalization

_PART_VALUES: Final = 2**24
"""Most float32 values of intermediate results that are computed in parts."""
_CACHED_VALUES: Final = 2**20
"""The same for weights that a CPU converts."""
_LAYER_NORM_EPSILON: Final = 1e-5
_LEAST_NORM: Final = 1e-12
_OF_FEATURES: Final = frozenset({"b_enc", "b_gate", "r_mag", "b_mag", "threshold"})
"""Tensors with a number for each feature."""


class _Scaled(NamedTuple):
    """Scaled inputs, and the way back: a reconstruction ``y`` of the values is ``y * scale + shift``."""

    values: torch.Tensor
    scale: torch.Tensor | float
    shift: torch.Tensor | float


class _Encoder:
    """The encoder of all features of a dictionary or of some; ``norms`` are the decoder's, if it rescales."""

    def __init__(
        self, config: DictionaryConfig, tensors: Mapping[str, torch.Tensor], norms: torch.Tensor | None
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._norms = norms

    def activations(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the activations, ``[rows, features]``, of scaled inputs."""
        config, tensors = self._config, self._tensors
        if config.subtracts_decoder_bias:
            inputs = inputs - tensors["b_dec"].float()
        projected = _product(inputs, tensors["W_enc"])
        if config.architecture is Architecture.GATED:
            is_active = projected + tensors["b_gate"].float() > 0
            magnitude = projected * tensors["r_mag"].float().exp() + tensors["b_mag"].float()
            return magnitude.relu() * is_active
        projected = projected + tensors["b_enc"].float()
        if config.architecture.has_threshold:
            return projected.relu() * (projected > tensors["threshold"].float())
        if config.k is None:
            return projected.relu()
        if self._norms is not None:
            projected = projected * self._norms
        kept = projected.topk(config.k, dim=-1, sorted=False)
        return torch.zeros_like(projected).scatter_(-1, kept.indices, kept.values.relu())

    def subset(self, ids: torch.Tensor) -> _Encoder | None:
        """Return the encoder of some features, in float32; None if a feature depends on others (TOPK)."""
        if self._config.architecture is Architecture.TOPK:
            return None
        tensors = {"W_enc": self._tensors["W_enc"].index_select(1, ids).float()}
        for name in _OF_FEATURES & self._tensors.keys():
            tensors[name] = self._tensors[name].index_select(0, ids).float()
        tensors["b_dec"] = self._tensors["b_dec"]
        return _Encoder(self._config, tensors, None)


class Dictionary:
    """A sparse autoencoder or a transcoder; ValueError unless tensors are as ``DictionaryConfig`` says."""

    def __init__(self, config: DictionaryConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes != config.tensor_shapes:
            raise ValueError(
                f"a dictionary ({config.architecture}) has the tensors {config.tensor_shapes}, got {shapes}"
            )
        self.config = config
        self.tensors = dict(tensors)
        self._decoder_norms = (
            tensors["W_dec"].float().norm(dim=-1) if config.rescales_by_decoder_norm else None
        )
        self._encoder = _Encoder(config, tensors, self._decoder_norms)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activations ``[rows, num_features]`` of values ``[rows, input_width]``."""
        return self._encoder.activations(self._scaled(x).values)

    def top(self, x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and activations, ``[rows, k]``, the largest first; inactive ones have no order."""
        if not 0 < k <= self.config.num_features:
            raise ValueError(f"k must be from 1 to {self.config.num_features}, got {k}")
        by_part = [self.encode(part).topk(k, dim=-1) for part in self.parts(x)]
        if not by_part:
            return x.new_zeros((0, k), dtype=torch.int64), x.new_zeros((0, k), dtype=torch.float32)
        return torch.cat([top.indices for top in by_part]), torch.cat([top.values for top in by_part])

    def decode(self, activations: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
        """Return what activations ``[rows, num_features]`` stand for, ``[rows, output_width]``.

        The encoded values ``x`` scale it back and feed a skip connection; ValueError if needed and missing.
        """
        config, weights = self.config, activations.float()
        if self._decoder_norms is not None:
            weights = weights / self._decoder_norms.clamp(min=_LEAST_NORM)
        decoded = weights @ self.tensors["W_dec"].float() + self.tensors["b_dec"].float()
        if config.architecture.is_transcoder:
            if not config.architecture.has_skip:
                return decoded
            return decoded + _needed(x).float() @ self.tensors["W_skip"].float().T
        if config.normalization is Normalization.NONE:
            return decoded
        if config.normalization is Normalization.EXPECTED_AVERAGE:
            return decoded / config.input_factor
        scaled = self._scaled(_needed(x))
        return decoded * scaled.scale + scaled.shift

    def reconstruct(self, x: torch.Tensor) -> torch.Tensor:
        """Return the reconstructions ``[rows, output_width]`` of values ``[rows, input_width]``."""
        parts = [self.decode(self.encode(part), part) for part in self.parts(x)]
        return torch.cat(parts) if parts else x.new_zeros((0, self.config.output_width), dtype=torch.float32)

    def error(self, x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """Return what a reconstruction lacks, ``target - reconstruct(x)``; ``target`` is ``x`` if None."""
        return (x if target is None else target).float() - self.reconstruct(x)

    def with_features(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        change: Change,
        values: torch.Tensor | float = 0.0,
        target: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return values in which features have other activations, with the reconstruction's error kept.

        That is ``target + sum((new - old) * W_dec[id])``, scaled back, in the dtype of ``target``.

        Args:
            ids: Different features, ``[ids]``, int64.
            change: SET ``v``, ADD ``a + v``, SCALE ``a * v``, ABLATE 0. Sums are not kept from below zero.
            values: ``v``: a number, ``[ids]`` or ``[rows, ids]``.
            target: Values at a transcoder's output point (ValueError if None); otherwise None for ``x``.
        """
        if target is None:
            if self.config.architecture.is_transcoder:
                raise ValueError("a transcoder changes the values of its output point: give `target`")
            target = x
        new_values = torch.as_tensor(values, dtype=torch.float32, device=x.device)
        gain, offset = new_values * change.gain[0] + change.gain[1], new_values * change.offset
        return (target.float() + Selection(self, ids).moves(x, gain, offset)).to(target.dtype)

    def encoder_of(self, ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function from values to the activations of some features, ``[rows, ids]``."""
        subset = self._encoder.subset(ids)
        if subset is not None:
            return lambda x: subset.activations(self._scaled(x).values)

        def chosen(x: torch.Tensor) -> torch.Tensor:
            parts = [self.encode(part).index_select(1, ids) for part in self.parts(x)]
            return torch.cat(parts) if parts else x.new_zeros((0, len(ids)), dtype=torch.float32)

        return chosen

    def scale_of(self, x: torch.Tensor) -> torch.Tensor | float:
        """Return the factor on changes of the reconstruction of ``x``, a number or ``[rows, 1]``."""
        scale = self.constant_scale
        return self._scaled(x).scale if scale is None else scale

    @property
    def constant_scale(self) -> float | None:
        """That factor, if it is the same for all values."""
        if self.config.architecture.is_transcoder or self.config.normalization is Normalization.NONE:
            return 1.0
        is_expected = self.config.normalization is Normalization.EXPECTED_AVERAGE
        return 1.0 / self.config.input_factor if is_expected else None

    def directions(self, ids: torch.Tensor) -> torch.Tensor:
        """Return what one unit of the activation of features adds to a reconstruction, ``[ids, width]``."""
        directions: torch.Tensor = self.tensors["W_dec"].index_select(0, ids).float()
        if self._decoder_norms is not None:
            norms = self._decoder_norms.index_select(0, ids).clamp(min=_LEAST_NORM)
            directions /= norms.unsqueeze(1)
        return directions

    def _scaled(self, x: torch.Tensor) -> _Scaled:
        """Return values scaled for the encoder, see ``Normalization``."""
        x = x.float()
        match self.config.normalization:
            case Normalization.NONE:
                return _Scaled(x, 1.0, 0.0)
            case Normalization.EXPECTED_AVERAGE:
                factor = self.config.input_factor
                return _Scaled(x * factor, 1.0 / factor, 0.0)
            case Normalization.LAYER_NORM:
                mean = x.mean(dim=-1, keepdim=True)
                centred = x - mean
                # torch's `std` warns where there are no rows.
                num_others = max(1, self.config.input_width - 1)
                deviation = (centred.square().sum(dim=-1, keepdim=True) / num_others).sqrt()
                return _Scaled(centred / (deviation + _LAYER_NORM_EPSILON), deviation, mean)
            case Normalization.CONSTANT_NORM:
                norm = x.norm(dim=-1, keepdim=True).clamp(min=_LEAST_NORM)
                scale = norm / self.config.input_width**0.5
                return _Scaled(x / scale, scale, 0.0)

    def parts(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the rows in parts, so that ``[rows, num_features]`` is small for each."""
        num_rows = max(1, _PART_VALUES // self.config.num_features)
        for start in range(0, len(x), num_rows):
            yield x[start : start + num_rows]


class Selection:
    """Some different features (``ids``, int64) of a dictionary, whose weights are gathered once."""

    def __init__(self, dictionary: Dictionary, ids: torch.Tensor) -> None:
        self.activations = dictionary.encoder_of(ids)
        self._dictionary = dictionary
        self._ids = ids

    @functools.cached_property
    def _directions(self) -> torch.Tensor:
        return self._dictionary.directions(self._ids)

    def moves(self, x: torch.Tensor, gain: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        """Return the effect of activations ``gain * a + offset``, ``[rows, output_width]``, float32.

        ``gain`` and ``offset`` broadcast to ``[rows, ids]``; with gain 1 and offset 0 nothing is added,
        whatever ``a`` is.
        """
        # A gain of 1 needs no activation: one that is infinite would make 0 * inf of it.
        change = torch.where(gain == 1, 0.0, (gain - 1) * self.activations(x)) + offset
        return change @ self._directions * self._dictionary.scale_of(x)

    def constant_move(self, offset: torch.Tensor) -> torch.Tensor | None:
        """Return what offsets ``[ids]`` alone add, ``[output_width]``; None if that depends on the values."""
        scale = self._dictionary.constant_scale
        return None if scale is None else offset @ self._directions * scale


def _product(inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return ``inputs @ weights`` in float32; weights of another dtype are converted in parts."""
    if weights.dtype == torch.float32:
        return inputs @ weights
    width, num_columns = weights.shape
    # On a CPU the part stays in the cache: fresh memory for each part takes five times as long.
    step = max(1, (_CACHED_VALUES if inputs.device.type == "cpu" else _PART_VALUES) // width)
    part = inputs.new_empty((width, min(step, num_columns)))
    result = inputs.new_empty((len(inputs), num_columns))
    for columns, columns_out in zip(weights.split(step, dim=1), result.split(step, dim=1), strict=True):
        columns_out.copy_(inputs @ part[:, : columns.shape[1]].copy_(columns))
    return result


def _needed(x: torch.Tensor | None) -> torch.Tensor:
    if x is None:
        raise ValueError("this dictionary needs the values that were encoded: give `x`")
    return x
