"""Loops over the steps of a run."""

from nnsight_engine.interleaving.iteration import IteratorTracer

__all__ = ["IteratorTracer"]
