"""A client's own names and envoy classes for modules (``rename=``, ``envoys=``), encoded for the workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nnsight_engine.envoys.aliases import Rename
from nnsight_engine.envoys.envoy import EnvoyMap
from nnsight_engine.serialization import encode


@dataclasses.dataclass(frozen=True, slots=True)
class ClientNames:
    """A client's additions to the module tree; ``envoys`` are by vLLM's class or by the end of a path."""

    rename: Rename | None = None
    envoys: EnvoyMap = None

    def write(self) -> bytes | None:
        """Return the additions as a message, or None if there are none; raise EncodeError."""
        if not self.rename and self.envoys is None:
            return None
        envoys: Any = self.envoys
        if isinstance(envoys, Mapping):
            envoys = list(envoys.items())
        return encode({"rename": dict(self.rename or {}), "envoys": envoys})
