"""The classes that stand for a layer's parts: standard points as properties, ``layers[3].attn.heads``.

What an envoy has anyway keeps its meaning: ``output`` is what the module returns, a tuple for attention, and
a module of a name hides the point of that name (GPT-2's MLP has an ``act``). ``model.points`` has every
point, by its name, on every architecture. ``architecture`` chooses a class for each module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nnsight_engine.envoys.envoy import Envoy

if TYPE_CHECKING:
    from nnsight_engine.envoys.architectures.named_points import PointGroup
    from nnsight_engine.envoys.architectures.points import Points


class point:  # noqa: N801 - it is used like property
    """A property that is a standard point of the layer that its envoy is in; reads and writes wait for it."""

    def __init__(self, leaf: str, doc: str) -> None:
        """Be the leaf ``attn.heads``, say, of the layer."""
        self.leaf = leaf
        self.__doc__ = doc

    def __get__(self, holder: Envoy | None, owner: type | None = None) -> Any:
        """Wait for the value."""
        if holder is None:
            return self
        points, layer = _layer_of(holder)
        return points[f"layers.{layer}.{self.leaf}"]

    def __set__(self, holder: Envoy, value: torch.Tensor) -> None:
        """Wait for the value to come by, and replace it."""
        points, layer = _layer_of(holder)
        points[f"layers.{layer}.{self.leaf}"] = value


class AttentionEnvoy(Envoy):
    """Stands for an attention module."""

    q = point(
        "attn.q",
        "Queries, ``[batch, tokens, heads, head_dim]``, as projected: before rotary embedding and norms.",
    )
    k = point("attn.k", "Keys, ``[batch, tokens, kv_heads, head_dim]``, likewise.")
    v = point("attn.v", "Values, ``[batch, tokens, kv_heads, head_dim]``.")
    heads = point(
        "attn.heads",
        "Each head's result before the output projection, ``[batch, tokens, heads, head_dim]``.",
    )
    pattern = point(
        "attn.pattern",
        "Attention probabilities, ``[batch, heads, tokens, keys]``; written in eager attention only.",
    )


class UpEnvoy(Envoy):
    """Stands for an MLP without a gate that has a module called ``act``."""

    up = point("mlp.up", "The up projection, ``[batch, tokens, inner]``.")


class MlpEnvoy(UpEnvoy):
    """Stands for an MLP without a gate."""

    act = point(
        "mlp.act", "What the down projection is called with, ``[batch, tokens, inner]``: the neurons."
    )


class GatedMlpEnvoy(MlpEnvoy):
    """Stands for an MLP with a gate."""

    gate = point(
        "mlp.gate", "The gate projection, before the activation function, ``[batch, tokens, inner]``."
    )


class SplitMlpLayerEnvoy(Envoy):
    """Stands for a layer that has the MLP's modules itself (OPT)."""

    @property
    def mlp(self) -> PointGroup:
        """The MLP's points: ``mlp.input``, ``up``, ``act`` and ``output``."""
        points, layer = _layer_of(self)
        return points.group(f"layers.{layer}.mlp")


def _layer_of(envoy: Envoy) -> tuple[Points, int]:
    """Return the model's points, and the layer that ``envoy`` is or is in.

    Raises:
        AttributeError: The root was not made by ``NNsight``, which finds the points.
    """
    points: Points | None = envoy._root.__dict__.get("_points")
    if points is None:
        raise AttributeError(f"{envoy.path} has standard points if the model is wrapped by NNsight")
    return points, points.layer_of(envoy)
