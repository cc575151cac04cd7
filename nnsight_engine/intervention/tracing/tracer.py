"""Traces beside a run of the model, on real tensors or on fake ones."""

from nnsight_engine.envoys.cache import Cache
from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.envoys.tracers.scanning import ScanningTracer
from nnsight_engine.interleaving.barrier import Barrier
from nnsight_engine.tracing.tracer import Tracer

__all__ = ["Barrier", "Cache", "InterleavingTracer", "ScanningTracer", "Tracer"]
