"""Which sites of the model a worker has: all, or those of its stage of a pipeline."""

from __future__ import annotations

import dataclasses
from typing import Final

from nnsight_engine.core.tap_choice import tap_of
from nnsight_engine.plans.sites import PlannedSite

SiteKey = int | PlannedSite
"""The number of a tap (0 before the first layer, i + 1 after layer i), or any other site as it is."""


def site_key(site: PlannedSite) -> SiteKey:
    """Return the canonical key of a site: the end of layer i and the start of layer i + 1 are one tap."""
    tap = tap_of(site.leaf, site.layer)
    return site if tap is None else tap


def name_of(key: SiteKey) -> str:
    if not isinstance(key, int):
        return str(key)
    return str(PlannedSite("output", key - 1) if key else PlannedSite("input", 0))


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """The layers of a pipeline stage, from ``start`` up to ``stop``, which is None on the last stage."""

    start: int = 0
    stop: int | None = None

    @property
    def is_last(self) -> bool:
        """Whether the worker has the model's end, where tokens are sampled and results are collected."""
        return self.stop is None

    def has(self, key: SiteKey) -> bool:
        if isinstance(key, int):
            layer = max(0, key - 1)
        elif key.layer >= 0:
            layer = key.layer
        else:
            return self.is_last
        return self.start <= layer and (self.stop is None or layer < self.stop)


WHOLE: Final = Stage()
"""The part of a worker that has the whole model."""
