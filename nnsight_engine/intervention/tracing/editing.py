"""Blocks that are kept on a model."""

from nnsight_engine.envoys.tracers.editing import EditingTracer

__all__ = ["EditingTracer"]
