"""Views of a point's part of a module's tensor; a part that cannot be a view is a copy, put back later.

Envoy classes for a layer's parts: standard points as properties, ``layers[3].attn.heads``.

Existing names keep their meaning: ``output`` is the module's return value (a tuple for attention), and
a submodule hides the point of the same name (GPT-2's MLP has an ``act``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from nnsight_engine.envoys.envoy import Envoy

if TYPE_CHECKING:
    from nnsight_engine.envoys.architectures.named_points import PointGroup
    from nnsight_engine.envoys.architectures.points import Points

Part = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """A view of a part of a tensor.

    Attributes:
        is_all: Whether the part has all numbers of the whole, possibly in another shape.
        is_copy: Whether the part does not share the memory of the whole.
        columns: Returns the same numbers of the whole in its memory, if ``part`` does not.
    """

    part: Part
    is_all: bool = True
    is_copy: bool = False
    columns: Part | None = None

    def joined(self, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return the whole with the part replaced; ``whole`` itself is not changed."""
        if self.is_all:
            joined = part.reshape(whole.shape)
            return joined.clone() if self.is_copy else joined
        new = whole.clone()
        columns = (self.columns or self.part)(new)
        columns.copy_(part.reshape(columns.shape))
        return new


def _unchanged(whole: torch.Tensor) -> torch.Tensor:
    return whole


WHOLE: Final = View(_unchanged)
COPY: Final = View(torch.clone, is_copy=True)
"""The whole where the model goes on to change it in place, so that a reader has a tensor of its own."""


def heads(num_heads: int) -> View:
    """Return the view ``[..., heads, head_dim]`` of ``[..., heads * head_dim]``."""
    return View(lambda whole: whole.unflatten(-1, (num_heads, -1)))


def fused_heads(index: int, num_heads: Sequence[int]) -> View:
    """Return the view ``[..., heads, head_dim]`` of projection ``index`` of several that are concatenated."""
    start, count = sum(num_heads[:index]), num_heads[index]
    total = sum(num_heads)

    def part(whole: torch.Tensor) -> torch.Tensor:
        size = whole.shape[-1] // total
        columns = whole.narrow(-1, start * size, count * size)
        return columns.view(*columns.shape[:-1], count, size)

    return View(part, is_all=False)


def fused_per_head(index: int, num_heads: int, num_kv_heads: int) -> View:
    """Return the view ``[..., heads, head_dim]`` of q, k or v in ``[..., kv_heads, (queries, k, v), size]``.

    ``index`` is 0 for the queries, which are those of the key and the value beside them, 1 for k, 2 for v.
    """
    group = num_heads // num_kv_heads
    start, count = ((0, group), (group, 1), (group + 1, 1))[index]

    def columns(whole: torch.Tensor) -> torch.Tensor:
        grouped: torch.Tensor = whole.unflatten(-1, (num_kv_heads, group + 2, -1))
        return grouped.narrow(-2, start, count)

    # Queries of several groups have the keys and the values between them.
    is_copy = count > 1 and num_kv_heads > 1
    return View(lambda whole: columns(whole).flatten(-3, -2), is_all=False, is_copy=is_copy, columns=columns)


def before_gates(num_heads: int) -> View:
    """Return the view ``[..., heads, head_dim]`` of ``[..., heads * 2 * head_dim]``, without the gates."""
    return View(lambda whole: whole.unflatten(-1, (num_heads, 2, -1))[..., 0, :], is_all=False)


def half(index: int) -> View:
    """Return the view of the first (0) or the second (1) half."""

    def part(whole: torch.Tensor) -> torch.Tensor:
        size = whole.shape[-1] // 2
        return whole.narrow(-1, index * size, size)

    return View(part, is_all=False)


class point:  # noqa: N801 - it is used like property
    """A property that is a standard point of its envoy's layer; ``leaf`` is its name, ``attn.heads``."""

    def __init__(self, leaf: str, doc: str) -> None:
        self.leaf = leaf
        self.__doc__ = doc

    def __get__(self, holder: Envoy | None, owner: type | None = None) -> Any:
        if holder is None:
            return self
        points, layer = _layer_of(holder)
        return points[f"layers.{layer}.{self.leaf}"]

    def __set__(self, holder: Envoy, value: torch.Tensor) -> None:
        points, layer = _layer_of(holder)
        points[f"layers.{layer}.{self.leaf}"] = value


class AttentionEnvoy(Envoy):
    """Envoy of an attention module."""

    q = point(
        "attn.q",
        "Queries, ``[batch, tokens, heads, head_dim]``, as projected: before rotary embedding and norms.",
    )
    k = point("attn.k", "Keys, ``[batch, tokens, kv_heads, head_dim]``, likewise.")
    v = point("attn.v", "Values, ``[batch, tokens, kv_heads, head_dim]``.")
    latent = point(
        "attn.latent",
        "Compressed keys and values after their norm, ``[batch, tokens, width]``, of attention with such.",
    )
    heads = point(
        "attn.heads",
        "Each head's result before the output projection, ``[batch, tokens, heads, head_dim]``.",
    )
    pattern = point(
        "attn.pattern",
        "Attention probabilities, ``[batch, heads, tokens, keys]``; written in eager attention only.",
    )


class UpEnvoy(Envoy):
    """Envoy of an MLP without a gate that has a submodule called ``act``."""

    up = point("mlp.up", "The up projection, ``[batch, tokens, inner]``.")


class MlpEnvoy(UpEnvoy):
    """Envoy of an MLP without a gate."""

    act = point("mlp.act", "The input of the down projection, ``[batch, tokens, inner]``: the neurons.")


class GatedMlpEnvoy(MlpEnvoy):
    """Envoy of an MLP with a gate."""

    gate = point(
        "mlp.gate", "The gate projection, before the activation function, ``[batch, tokens, inner]``."
    )


class SplitMlpLayerEnvoy(Envoy):
    """Envoy of a layer that has the MLP's modules as its own children (OPT)."""

    @property
    def mlp(self) -> PointGroup:
        """The MLP's points: ``mlp.input``, ``up``, ``act`` and ``output``."""
        points, layer = _layer_of(self)
        return points.group(f"layers.{layer}.mlp")


class OneMixerLayerEnvoy(SplitMlpLayerEnvoy):
    """Envoy of a layer with one module, attention in some layers and an MLP in others (NemotronH)."""

    @property
    def attn(self) -> PointGroup:
        """Attention's points."""
        points, layer = _layer_of(self)
        return points.group(f"layers.{layer}.attn")


def _layer_of(envoy: Envoy) -> tuple[Points, int]:
    """Return the points and the layer's number; AttributeError if ``NNsight`` did not create the root."""
    points: Points | None = envoy._root.__dict__.get("_points")
    if points is None:
        raise AttributeError(f"{envoy.path} has standard points if the model is wrapped by NNsight")
    return points, points.layer_of(envoy)
