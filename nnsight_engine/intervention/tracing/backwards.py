"""A backward pass with a block beside it."""

from nnsight_engine.envoys.tracers.backwards import BackwardsTracer

__all__ = ["BackwardsTracer"]
