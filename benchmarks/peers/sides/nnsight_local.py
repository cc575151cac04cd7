"""nnsight's tracing: the blocks are ours, letter by letter."""

from __future__ import annotations

import importlib
from pathlib import Path

from benchmarks.peers.sides.local import LocalSide, models_in
from benchmarks.peers.sides.traces import trace_works


def side(path: Path) -> LocalSide:
    """Return the side."""
    models = models_in(path)
    return LocalSide(models, trace_works(importlib.import_module("nnsight"), models))
