"""The import location of ``VLLM`` for users of nnsight; importing this module must not load vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import nnsight_engine

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.vllm import VLLM

__all__ = ["VLLM"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return getattr(nnsight_engine, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers VLLM")
