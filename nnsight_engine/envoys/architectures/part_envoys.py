"""Envoy classes for a layer's parts: standard points as properties, ``layers[3].attn.heads``.

Existing names keep their meaning: ``output`` is the module's return value (a tuple for attention), and
a submodule hides the point of the same name (GPT-2's MLP has an ``act``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nnsight_engine.envoys.envoy import Envoy

if TYPE_CHECKING:
    from nnsight_engine.envoys.architectures.named_points import PointGroup
    from nnsight_engine.envoys.architectures.points import Points


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
