"""Interventions inside a model: steer, ablate, patch, capture and read it while it runs, here or inside vLLM.

The names below are the library's public surface. They load on first use, because
``import nnsight_engine`` must cost nothing: neither torch, nor vLLM, nor the web server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# At once: while a trace is open every object has a `save`, this module too, and that one would be found.
from nnsight_engine.core.saves import save

if TYPE_CHECKING:
    from nnsight_engine import intervention as intervention
    from nnsight_engine import modeling as modeling
    from nnsight_engine import util as util
    from nnsight_engine.core.config import CONFIG
    from nnsight_engine.envoys.display import load_ipython_extension as load_ipython_extension
    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.envoys.eproperty import eproperty
    from nnsight_engine.harvesting.call import harvest
    from nnsight_engine.modeling.base import NNsight
    from nnsight_engine.modeling.bundled import BUNDLED_MODEL_NAME, BundledModelError, bundled_model_path
    from nnsight_engine.modeling.diffusion import DiffusionModel
    from nnsight_engine.modeling.language import LanguageModel
    from nnsight_engine.modeling.vision_language import VisionLanguageModel
    from nnsight_engine.remote_backend.client.backend import RemoteBackend
    from nnsight_engine.remote_backend.client.status import is_model_running, ndif_status, status
    from nnsight_engine.remote_backend.errors import RemoteConnectionError, RemoteError
    from nnsight_engine.serialization.source.import_resolution import register_by_value, unregister_by_value

__version__ = "0.1.0"

__all__ = [
    "BUNDLED_MODEL_NAME",
    "CONFIG",
    "VLLM",
    "BundledModelError",
    "DiffusionModel",
    "Envoy",
    "LanguageModel",
    "NNsight",
    "RemoteBackend",
    "RemoteConnectionError",
    "RemoteError",
    "VisionLanguageModel",
    "__version__",
    "bundled_model_path",
    "eproperty",
    "harvest",
    "is_model_running",
    "ndif_status",
    "register_by_value",
    "save",
    "status",
    "unregister_by_value",
]

_DEFINED_IN = {
    "BUNDLED_MODEL_NAME": "nnsight_engine.modeling.bundled",
    "BundledModelError": "nnsight_engine.modeling.bundled",
    "CONFIG": "nnsight_engine.core.config",
    "DiffusionModel": "nnsight_engine.modeling.diffusion",
    "Envoy": "nnsight_engine.envoys.envoy",
    "LanguageModel": "nnsight_engine.modeling.language",
    "NNsight": "nnsight_engine.modeling.base",
    "RemoteBackend": "nnsight_engine.remote_backend.client.backend",
    "RemoteConnectionError": "nnsight_engine.remote_backend.errors",
    "RemoteError": "nnsight_engine.remote_backend.errors",
    "VLLM": "nnsight_engine.vllm_backend.vllm",
    "VisionLanguageModel": "nnsight_engine.modeling.vision_language",
    "bundled_model_path": "nnsight_engine.modeling.bundled",
    "eproperty": "nnsight_engine.envoys.eproperty",
    "harvest": "nnsight_engine.harvesting.call",
    "is_model_running": "nnsight_engine.remote_backend.client.status",
    "load_ipython_extension": "nnsight_engine.envoys.display",
    "ndif_status": "nnsight_engine.remote_backend.client.status",
    "register_by_value": "nnsight_engine.serialization.source.import_resolution",
    "status": "nnsight_engine.remote_backend.client.status",
    "unregister_by_value": "nnsight_engine.serialization.source.import_resolution",
}
# Names for old code; not listed and not stored in this module, since most of them are names of builtins.
_DEPRECATED = frozenset(
    ("apply", "bool", "bytes", "dict", "float", "int", "list", "local", "set", "str", "trace", "tuple")
)
# ``import nnsight_engine`` is enough to write ``nnsight_engine.intervention.envoy.Envoy``.
_PACKAGES = frozenset({"intervention", "modeling", "util"})

if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Load a public name from the module that defines it, and store it here."""
        if name in _PACKAGES:
            return importlib.import_module(f"{__name__}.{name}")
        if name in _DEPRECATED:
            return getattr(importlib.import_module("nnsight_engine.compat.deprecated"), name)
        module = _DEFINED_IN.get(name)
        if module is None:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}"
            )
        value = getattr(importlib.import_module(module), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
