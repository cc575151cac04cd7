"""``with tracer.iter[...]:``, the older syntax of a loop over steps, whose block runs once per step."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from typing import Any

from nnsight_engine.core.loop_end import IterationOver
from nnsight_engine.interleaving.interleaver import Interleaver
from nnsight_engine.interleaving.iteration import IteratorTracer, Steps
from nnsight_engine.tracing.block_names import mangled
from nnsight_engine.tracing.tracebacks import users_stacklevel
from nnsight_engine.tracing.tracer import Tracer


class StepsTracer(IteratorTracer, Tracer):
    """Steps to loop over, by ``for`` or by ``with``; see ``IteratorTracer``."""

    def __init__(self, steps: Steps, interleaver: Interleaver) -> None:
        IteratorTracer.__init__(self, steps, interleaver)
        Tracer.__init__(self)

    def __enter__(self) -> Any:
        warnings.warn(
            "`with tracer.iter[...]:` and `with tracer.all():` are the older spelling; write "
            "`for step in tracer.iter[...]:`",
            DeprecationWarning,
            stacklevel=users_stacklevel(),
        )
        return super().__enter__()

    def execute(self, function: Callable[[], Any]) -> None:
        """Run the block in each step, with the step's number in the variable after ``as``."""
        cell = self.info.variables.get(self._target() or "")
        try:
            for step in self:
                if cell is not None:
                    cell.cell_contents = step
                function()
        except IterationOver as over:
            if over.loop is not self:
                raise

    def _target(self) -> str | None:
        origin, context = self.info.block.origin, self.info.block.context
        target = origin.node.items[origin.item].optional_vars
        if not isinstance(target, ast.Name):
            return None
        (name,) = mangled(frozenset({target.id}), context.class_name)
        return name
