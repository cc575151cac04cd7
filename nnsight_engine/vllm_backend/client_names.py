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
    """A client's additions to the module tree.

    Attributes:
        rename: Additional names for modules, see ``envoys.aliases``.
        envoys: Classes that represent modules: by vLLM's class, by the end of a path, or one for all.
    """

    rename: Rename | None = None
    envoys: EnvoyMap = None

    def write(self) -> bytes | None:
        """Return the additions as a message, or None if there are none.

        Raises:
            EncodeError: A name or a class cannot be encoded.
        """
        if not self.rename and self.envoys is None:
            return None
        envoys: Any = self.envoys
        if isinstance(envoys, Mapping):
            envoys = list(envoys.items())
        return encode({"rename": dict(self.rename or {}), "envoys": envoys})
