"""Blocks of this process as they would be sent, for tests of what carries them."""

from __future__ import annotations

from typing import Any

from nnsight_engine.core.closure_cells import content
from nnsight_engine.serialization import SentBlock
from nnsight_engine.tracing.tracer import Info, Tracer


class Recorder(Tracer):
    """Keeps its block, filled, and runs nothing."""

    def execute(self, function: Any) -> None:
        info = self.info
        self.kept = SentBlock(
            Info(info.block, dict(info.variables), None, info.globals_), dict(info.variables)
        )


def run(info: Info) -> dict[str, Any]:
    """Run a block, and return what its variables hold then."""
    Tracer().compile_on(info)()
    return {name: content(cell) for name, cell in info.variables.items()}
