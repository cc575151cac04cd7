"""The description of a loaded model for interventions: its points, their widths, its limits.

The worker describes the model once, at start. Admission checks requests against the description, and ``GET
/v1/capabilities`` returns it. It is transferred as plain JSON values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from api_schemas.points import ENCODER_BLOCK

_LEAST_WORK: Final = 2**24


@dataclasses.dataclass(frozen=True, slots=True)
class LeafSpec:
    """One kind of point: ``attn.q`` of a layer, or a point of the whole model such as ``logits``.

    Attributes:
        name: ``embed.output``, ``norm.output``, ``logits``, ``samples``, or a layer's leaf (``input``,
            ``output``, ``attn.output``, ``attn.q``, …) without its layer.
        shape: Shape of one position's value, ``(hidden,)`` or ``(heads, head_dim)``; empty for ``samples``,
            where a value is one token id, and ``(heads, -1)`` for ``attn.pattern``, whose last axis grows
            with the position.
        tier: ``tap`` where the compiled step serves it, ``eager`` where the step must run uncompiled with
            hooks.
        operations: The operations that may name this point.
        layers: The layers that have it in this shape; None for all, and for a point of the whole model. Those
            of a vision encoder's leaf are the encoder's.
        num_patches: Number of rows for each position; several only in a vision encoder, which has one for
            each patch of an image.
    """

    name: str
    shape: tuple[int, ...]
    tier: str
    operations: tuple[str, ...]
    layers: tuple[int, ...] | None = None
    num_patches: int = 1

    @property
    def width(self) -> int:
        """Number of elements of one position's value; an axis that grows counts as one."""
        total = 1
        for size in self.shape:
            total *= abs(size)
        return total


def leaf_at(leaves: Sequence[LeafSpec], name: str, layer: int | None = None) -> LeafSpec | None:
    """Return the leaf called ``name`` of a layer, see ``ModelSpec.leaf``."""
    return next(
        (
            leaf
            for leaf in leaves
            if leaf.name == name and (layer is None or leaf.layers is None or layer in leaf.layers)
        ),
        None,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model as interventions see it; sizes are of the whole model, not of one rank.

    Attributes:
        leaves: The kinds of points. A leaf that has several shapes is listed with each, for its layers.
        max_work: Limit on the work of a request's operations at one position, see ``plans.work``.
        num_stages: Number of pipeline stages.
        max_dictionary_bytes: Limit on the weights of all loaded dictionaries.
        layout: Where the points lie in the model's modules, ``ModelLayout.to_plain``; empty if there are no
            traces.
    """

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    max_model_len: int
    max_num_batched_tokens: int
    leaves: tuple[LeafSpec, ...]
    max_capture_bytes: int
    max_work: float = 64.0
    num_stages: int = 1
    max_dictionary_bytes: int = 2 * 1024**3
    layout: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def forward_work(self) -> int:
        """Multiply-adds of a forward pass for one position, estimated from the sizes of a dense model.

        A model of few weights counts as one of ``_LEAST_WORK``, near the time that any step takes.
        """
        width = self.hidden_size
        return max(_LEAST_WORK, width * (12 * width * self.num_layers + self.vocab_size))

    def leaf(self, name: str, layer: int | None = None) -> LeafSpec | None:
        """Return the leaf called ``name`` of a layer, or of any layer; None if there is none.

        Args:
            name: The leaf's name.
            layer: The layer, -1 for a point of the whole model; None for any.
        """
        return leaf_at(self.leaves, name, layer)

    def layers_of(self, name: str) -> list[int]:
        """Return the layers that have the leaf called ``name``."""
        return [layer for layer in range(self.num_layers_of(name)) if self.leaf(name, layer) is not None]

    def num_layers_of(self, name: str) -> int:
        """Return the number of layers among which a leaf's are counted: those of the model or its encoder."""
        encoder = self.leaf(ENCODER_BLOCK) if name == ENCODER_BLOCK else None
        return self.num_layers if encoder is None or encoder.layers is None else len(encoder.layers)

    def to_plain(self) -> dict[str, Any]:
        """Return the description as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> ModelSpec:
        """Return the description from the result of ``to_plain``; lists become tuples again."""
        leaves = tuple(
            LeafSpec(
                name=leaf["name"],
                shape=tuple(leaf["shape"]),
                tier=leaf["tier"],
                operations=tuple(leaf["operations"]),
                layers=None if leaf["layers"] is None else tuple(leaf["layers"]),
                num_patches=leaf["num_patches"],
            )
            for leaf in plain["leaves"]
        )
        return cls(**{**plain, "leaves": leaves})
