"""The tasks of all sides: the same work on the same models and inputs.

The table and the sides in either environment import this module: it uses nothing of ours or of a peer's.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from benchmarks.precision import DTYPE, DTYPE_NAME

NUM_TOKENS: Final = 16
NUM_PROMPTS: Final = 4
LAYER: Final = 15
"""Of the language model."""
NUM_SMALL_LAYERS: Final = 12
_NUM_REQUESTS: Final = 8
_PROMPT_TOKENS: Final = 12
_LOWEST_TOKEN: Final = 100
"""Ids below it are special tokens."""
_BF16_ROUNDING: Final = 0.02

ENGINE_ARGUMENTS: Final[dict[str, Any]] = {"dtype": DTYPE_NAME, "max_model_len": 512}
"""Beside the model and ``enforce_eager``, which interp-engine sets itself where any point may be read."""

Array = NDArray[np.float32]

Work = Callable[[], list[torch.Tensor]]
"""Does a task once, and returns the values that it read."""

Works = dict[str, Work]
"""A side's work by the key of its task."""


class NotOfferedError(Exception):
    """A side cannot do this task through its public API; the message gives the reason."""


class Size(NamedTuple):
    """A model, and the largest difference of values that is rounding, as a share of the largest value."""

    name: str
    rounding: float


SMALL: Final = Size("MLP", 1e-5)
LANGUAGE: Final = Size("SmolLM2", _BF16_ROUNDING)
SERVED: Final = Size("SmolLM2 in vLLM", _BF16_ROUNDING)


class Task(NamedTuple):
    """One thing to do: the key of a side's work that does it, its name, and the model."""

    key: str
    name: str
    size: Size


_LOCAL: Final = (
    Task("one_value", "one layer's output saved", SMALL),
    Task("all_values", "every layer's output saved", SMALL),
    Task("one_write", "one layer's output replaced, result saved", SMALL),
    Task("shared_invokes", "twelve invokes of one input, a layer each", SMALL),
    Task("gradient", "gradient at one layer's output", SMALL),
    Task("one_value", "one layer's output saved", LANGUAGE),
    Task("all_values", "every layer's output saved", LANGUAGE),
    Task("one_write", "vector added at one layer, logits saved", LANGUAGE),
    Task("batched_invokes", f"{NUM_PROMPTS} invokes batched, one layer's output each", LANGUAGE),
    Task("generation", f"{NUM_TOKENS} tokens generated, one layer's output at each", LANGUAGE),
    Task("gradient", "gradient at one layer's output", LANGUAGE),
)
_SERVING: Final = (
    Task("idle", f"{_NUM_REQUESTS} requests, none looked into", SERVED),
    Task("one_reads", f"{_NUM_REQUESTS} requests, one layer's output of one at each token", SERVED),
    Task("all_read", f"{_NUM_REQUESTS} requests, one layer's output of all at each token", SERVED),
    Task("all_steered", f"{_NUM_REQUESTS} requests, all steered at one layer and read", SERVED),
)
TASKS: Final = {"local": _LOCAL, "serving": _SERVING}


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """A model with its inputs.

    Attributes:
        layers_of: The layers below the module, or below its wrapper.
        layer: The one that is read or changed.
        inputs: ``[batch, width]``, or ids ``[1, tokens]``.
        vector: ``[width]``, added where a task writes.
        result_of: The part of the model's output that is saved.
    """

    module: Any
    layers_of: Callable[[Any], Any]
    layer: int
    inputs: torch.Tensor
    vector: torch.Tensor
    result_of: Callable[[Any], torch.Tensor]

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers_of(self.module))

    @property
    def prompts(self) -> list[torch.Tensor]:
        """Several inputs of the same length, ``[1, tokens]`` each."""
        return [self.inputs + index for index in range(NUM_PROMPTS)]

    def twin(self) -> Subject:
        """Return the same with another module on the very same weights, which no library wraps."""
        shared = {id(weight): weight for weight in self.module.parameters()}
        return dataclasses.replace(self, module=copy.deepcopy(self.module, shared))


def small_subject(width: int = 64, batch: int = 1) -> Subject:
    """Return a stack of layers, so small that the cost of a library shows."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(NUM_SMALL_LAYERS)]
    return Subject(
        module=torch.nn.Sequential(*layers).requires_grad_(requires_grad=False),
        layers_of=lambda root: root,
        layer=5,
        inputs=torch.randn(batch, width),
        vector=torch.randn(width),
        result_of=lambda output: output,
    )


def language_subject(path: Path) -> Subject:
    """Return the language model in a folder."""
    module = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPE, attn_implementation="sdpa")
    return Subject(
        module=module.requires_grad_(requires_grad=False).eval(),
        layers_of=lambda root: root.model.layers,
        layer=LAYER,
        inputs=torch.tensor([_prompt_ids(0)]),
        vector=steering_vector(module.config.hidden_size),
        result_of=lambda output: output.logits[:, -1],
    )


def steering_vector(width: int) -> torch.Tensor:
    """Return the vector that is added at a layer of the language model, ``[width]``."""
    return torch.randn(width, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def prompts() -> list[list[int]]:
    """Return the prompts of the requests in vLLM."""
    return [_prompt_ids(seed) for seed in range(_NUM_REQUESTS)]


def _prompt_ids(seed: int) -> list[int]:
    """Return a prompt as ids; the highest leave room for those that are made of them by counting up."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(_LOWEST_TOKEN, 40_000, (_PROMPT_TOKENS,), generator=generator).tolist()
    return ids


def generation_options() -> dict[str, Any]:
    """Return the options of ``generate``: so many tokens, the likeliest each."""
    return {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0}


def arrays(values: Sequence[torch.Tensor]) -> list[Array]:
    """Return the values in float32, as they can be sent to another process."""
    return [value.detach().float().cpu().numpy() for value in values]


def difference(values: Sequence[Array], others: Sequence[Array]) -> float | None:
    """Return how far values lie apart, as a share of the largest; None where their shapes differ."""
    if [value.shape for value in values] != [other.shape for other in others]:
        return None
    apart = max(
        (float(abs(value - other).max()) for value, other in zip(values, others, strict=True)), default=0.0
    )
    largest = max((float(abs(other).max()) for other in others), default=0.0)
    return apart / largest if largest else apart
