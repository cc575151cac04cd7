"""Whose rows of a batch are whose."""

from nnsight_engine.interleaving.batching import Batchable, Batcher

__all__ = ["Batchable", "Batcher"]
