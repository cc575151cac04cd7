"""One input of a batch and its block."""

from nnsight_engine.envoys.tracers.invoker import Invoker

__all__ = ["Invoker"]
