"""Our tracing, in our environment."""

from __future__ import annotations

from pathlib import Path

import nnsight_engine
from benchmarks.peers.sides.local import LocalSide, models_in
from benchmarks.peers.sides.traces import trace_works


def side(path: Path) -> LocalSide:
    """Return the side."""
    models = models_in(path)
    return LocalSide(models, trace_works(nnsight_engine, models))
