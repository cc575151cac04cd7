"""Interventions inside vLLM: steer, ablate, patch, capture and read a model while it serves.

The names below are the library's public surface. They load on first use, because
``import nnsight_engine`` must cost nothing: neither torch, nor vLLM, nor the web server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnsight_engine.modeling.bundled import BUNDLED_MODEL_NAME, BundledModelError, bundled_model_path

__version__ = "0.1.0"

__all__ = ["BUNDLED_MODEL_NAME", "BundledModelError", "__version__", "bundled_model_path"]

_HOMES = {
    "BUNDLED_MODEL_NAME": "nnsight_engine.modeling.bundled",
    "BundledModelError": "nnsight_engine.modeling.bundled",
    "bundled_model_path": "nnsight_engine.modeling.bundled",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the module it lives in."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
