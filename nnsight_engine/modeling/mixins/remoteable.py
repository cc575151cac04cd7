"""Models that could run on another machine."""

from __future__ import annotations

from nnsight_engine.modeling.mixins.meta import MetaMixin


class RemoteableMixin(MetaMixin):
    """A model of which the structure is known here, and whose weights may be elsewhere."""
