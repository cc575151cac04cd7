"""The documented import paths of nnsight's ``intervention``, each leading to where the thing lives here.

The names are what people import, so they stay; nothing is defined here, and nothing of ours imports this.
"""

from nnsight_engine.intervention import (
    backends,
    batching,
    envoy,
    hooks,
    interleaver,
    serialization,
    tracing,
)

__all__ = ["backends", "batching", "envoy", "hooks", "interleaver", "serialization", "tracing"]
