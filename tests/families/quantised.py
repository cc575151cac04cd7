"""Checkpoints with quantised weights, and the models in transformers that compute the same.

Written anew from a float32 checkpoint, in the formats that tools for quantisation write. Transformers needs
packages of those tools to read them: the reference is a checkpoint with the weights that the quantised ones
stand for. Where a format quantises activations too, ``rounded_inputs`` does that in transformers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

_WEIGHTS: Final = "model.safetensors"
_PROJECTION: Final = "_proj.weight"
_GROUP_SIZE: Final = 32
_MAX_INT8: Final = 127
_MAX_FP8: Final = 448
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)

Entries = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix ``[out, in]`` as a format stores it.

    Attributes:
        entries: What the checkpoint has of it, by the part of the name after the layer's.
        weight: The float32 matrix that these stand for.
    """

    entries: Entries
    weight: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """A format of quantised checkpoints.

    Attributes:
        quantise: Quantises one matrix.
        config: The config's entry ``quantization_config``.
        dtype: What the engine computes in; vLLM takes no float32 with weights of four bits.
        tolerance: Largest difference from the reference, relative to the largest value. Where activations are
            quantised, one that lies between two steps may be rounded to the other one, which moves later
            values by some hundredths; all others agree to float32's rounding.
        seed: Seed of a Llama whose best tokens are further apart than most of these differences.
        round_inputs: Returns the inputs of a linear layer, ``[..., in]``, as it computes with them.
    """

    quantise: Callable[[torch.Tensor], Quantised]
    config: dict[str, Any]
    dtype: str
    tolerance: float
    seed: int
    round_inputs: Callable[[torch.Tensor], torch.Tensor] | None = None


def write_quantised(checkpoint: Path, directory: Path, form: Format) -> tuple[Path, Path]:
    """Write a checkpoint's projections in a format; return its folder, and that of the reference.

    Args:
        checkpoint: A float32 checkpoint in one file, with one projection per matrix.
        directory: Where to write both.
        form: The format.
    """
    quantised, reference = directory / "quantised", directory / "reference"
    weights = load_file(checkpoint / _WEIGHTS)
    compressed = {name: weight for name, weight in weights.items() if not name.endswith(_PROJECTION)}
    for name in weights.keys() - compressed.keys():
        result = form.quantise(weights[name])
        weights[name] = result.weight
        stem = name.removesuffix("weight")
        compressed |= {stem + part: entry.contiguous() for part, entry in result.entries.items()}
    for folder, contents in ((quantised, compressed), (reference, weights)):
        shutil.copytree(checkpoint, folder)
        save_file(contents, folder / _WEIGHTS, metadata={"format": "pt"})
    config = quantised / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": form.config}))
    return quantised, reference


@contextlib.contextmanager
def rounded_inputs(form: Format, vocab_size: int) -> Iterator[None]:
    """Have linear layers round their inputs as the format does, all but the unembedding."""
    rounding = form.round_inputs
    if rounding is None:
        yield
        return

    def forward(module: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        is_quantised = module.out_features != vocab_size
        return functional.linear(rounding(rows) if is_quantised else rows, module.weight, module.bias)

    with mock.patch.object(nn.Linear, "forward", forward):
        yield


def _largest(rows: torch.Tensor) -> torch.Tensor:
    return rows.abs().amax(dim=-1, keepdim=True)


def _int8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _largest(rows) / _MAX_INT8
    return (rows / scale).round().to(torch.int8), scale


def _fp8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _largest(rows) / _MAX_FP8
    return (rows / scale).to(torch.float8_e4m3fn), scale


Rows = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _in_eight_bits(rows: Rows, kind: str, tolerance: float) -> Format:
    """Return compressed-tensors' format of weights per output, and of activations per token."""

    def rounded(values: torch.Tensor) -> torch.Tensor:
        quantised, scale = rows(values)
        return quantised.float() * scale

    def quantise(weight: torch.Tensor) -> Quantised:
        quantised, scale = rows(weight)
        return Quantised({"weight": quantised, "weight_scale": scale}, rounded(weight))

    def scheme(strategy: str, *, dynamic: bool) -> dict[str, Any]:
        return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic}

    group = {
        "targets": ["Linear"],
        "weights": scheme("channel", dynamic=False),
        "input_activations": scheme("token", dynamic=True),
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    return Format(quantise, config, "float32", tolerance, seed=23, round_inputs=rounded)


def _gptq(weight: torch.Tensor) -> Quantised:
    """Quantise to four bits around a fixed zero, 8, in groups of inputs."""
    groups = _grouped(weight)
    scales = (groups.abs().amax(dim=1, keepdim=True) / 7).half()
    numbers = (groups / scales).round().clamp(-8, 7) + 8
    zeros = torch.full_like(scales, 7)  # one less than the zero, as its tools write it
    entries = {
        "qweight": _packed(_ungrouped(numbers), dim=0),
        "qzeros": _packed(zeros.squeeze(1), dim=1),
        "scales": scales.squeeze(1),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // _GROUP_SIZE,
    }
    return Quantised(entries, _ungrouped((numbers - 8) * scales.float()).T.contiguous())


def _awq(weight: torch.Tensor) -> Quantised:
    """Quantise to four bits between each group's least and largest weight."""
    groups = _grouped(weight)
    least, largest = groups.amin(dim=1, keepdim=True), groups.amax(dim=1, keepdim=True)
    scales = ((largest - least) / 15).half()
    zeros = (-least / scales).round().clamp(0, 15)
    numbers = ((groups / scales).round() + zeros).clamp(0, 15)
    entries = {
        "qweight": _packed(_reordered(_ungrouped(numbers)), dim=1),
        "qzeros": _packed(_reordered(zeros.squeeze(1)), dim=1),
        "scales": scales.squeeze(1),
    }
    return Quantised(entries, _ungrouped((numbers - zeros) * scales.float()).T.contiguous())


def _grouped(weight: torch.Tensor) -> torch.Tensor:
    """Return a matrix ``[out, in]`` as ``[groups, group size, out]``."""
    return weight.T.reshape(-1, _GROUP_SIZE, weight.shape[0])


def _ungrouped(groups: torch.Tensor) -> torch.Tensor:
    return groups.reshape(-1, groups.shape[-1])


def _reordered(numbers: torch.Tensor) -> torch.Tensor:
    """Return columns in the order in which AWQ packs eight of them."""
    return numbers.reshape(len(numbers), -1, 8)[..., list(_AWQ_ORDER)].reshape(numbers.shape)


def _packed(numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """Return eight numbers of four bits in each int32, along an axis, the first one lowest."""
    eights = numbers.to(torch.int64).movedim(dim, -1).unflatten(-1, (-1, 8))
    words = (eights << (4 * torch.arange(8))).sum(dim=-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32).movedim(-1, dim)


FORMATS: Final = {
    "int8": _in_eight_bits(_int8_rows, "int", tolerance=0.05),
    "fp8": _in_eight_bits(_fp8_rows, "float", tolerance=0.1),
    "gptq": Format(
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": _GROUP_SIZE, "desc_act": False, "sym": True},
        "float16",
        tolerance=0.03,
        seed=19,
    ),
    "awq": Format(
        _awq,
        {"quant_method": "awq", "bits": 4, "group_size": _GROUP_SIZE, "zero_point": True, "version": "gemm"},
        "float16",
        tolerance=0.03,
        seed=3,
    ),
}
"""The formats, by a short name."""
