"""One input of a batch and the block that sees its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nnsight_engine.core.config import CONFIG
from nnsight_engine.core.saves import SAVES
from nnsight_engine.tracing.tracer import Backend, Info, Tracer

if TYPE_CHECKING:
    from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer


class _Collect(Backend):
    """Leaves the block to the trace around it, which runs all of its invokes together."""

    def __call__(self, tracer: Tracer | None = None) -> Any:
        function = super().__call__(tracer)
        return tracer.execute(function) if tracer is not None else None


_COLLECT = _Collect()


class Invoker(Tracer):
    """``with tracer.invoke(input):``, defined now and run with the others when the trace's block ends."""

    _own: Info | None = None

    def __init__(self, parent: InterleavingTracer, *args: Any, **kwargs: Any) -> None:
        """Add to ``parent``.

        Raises:
            ValueError: The model is running already.
        """
        if parent.interleaver.interleaving:
            raise ValueError(
                "Cannot invoke during an active model execution / interleaving. Invokes stand side "
                "by side in a "
                "trace without an input of its own: `with model.trace() as tracer:`."
            )
        super().__init__(*args, backend=_COLLECT, **kwargs)
        self.parent = parent

    def compile(self) -> Callable[[], Any]:
        """Return the block as a function; on variables of its own if invokes may not share them."""
        if CONFIG.APP.CROSS_INVOKER:
            return self.compile_on(self.info)
        self._own = self.info.fresh()
        return self.compile_on(self._own)

    def execute(self, function: Callable[[], Any]) -> None:
        """Add the block and its input to the trace."""
        self.parent.invokers.append(self)
        self.parent.add(function, self._own or self.info, self.args, self.kwargs)

    def give_back(self) -> None:
        """Bind the saved values where the invoke was written."""
        if self._own is not None:
            for name in self.info.block.stored:
                cell = self._own.variables.get(name)
                if cell is not None and _holds_saved(cell):
                    self.info.variables[name].cell_contents = cell.cell_contents
        super().give_back()


def _holds_saved(cell: Any) -> bool:
    try:
        return SAVES.keeps(cell.cell_contents)
    except ValueError:  # never assigned
        return False
