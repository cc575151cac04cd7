from __future__ import annotations

from typing import Final

import msgspec

from api_schemas.points import ENCODER_BLOCK, point_name
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.tap_choice import tap_of


class PlannedSite(msgspec.Struct, frozen=True, array_like=True):
    """One place in the model: a leaf name of ``ModelSpec`` and its layer, -1 if it has none."""

    leaf: str
    layer: int = -1

    def __str__(self) -> str:
        return point_name(self.leaf, self.layer)

    @property
    def is_in_encoder(self) -> bool:
        """Whether it is in the vision encoder, which runs before the step and not in it."""
        return self.leaf == ENCODER_BLOCK


LOGITS: Final = PlannedSite("logits")
SAMPLES: Final = PlannedSite("samples")


def forward_order(site: PlannedSite, spec: ModelSpec) -> tuple[int, int]:
    """Return a key that is smaller for a site that the forward pass reaches earlier."""
    tap = tap_of(site.leaf, site.layer)
    if tap is not None:
        return 2 * tap, 0
    leaves = [leaf.name for leaf in spec.leaves]
    layer = site.layer if site.layer >= 0 else spec.num_layers
    return 2 * layer + 1, leaves.index(site.leaf)
