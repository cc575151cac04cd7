"""One input of a batch and the block that sees its rows."""

from __future__ import annotations

from collections.abc import Callable
from types import CellType
from typing import TYPE_CHECKING, Any

from nnsight_engine.interleaving.sharing import bring_home
from nnsight_engine.tracing.tracer import Backend, Tracer

if TYPE_CHECKING:
    from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer


class _Collect(Backend):
    """Leaves the block to the trace around it, which runs all of its invokes together."""

    def __call__(self, tracer: Tracer | None = None) -> Any:
        function = super().__call__(tracer)
        return tracer.execute(function) if tracer is not None else None


_COLLECT = _Collect()


class Invoker(Tracer):
    """``with tracer.invoke(input):``, defined now and run with the others when the trace's block ends.

    Attributes:
        outer: The variables of the surrounding code that the block mentions.
        own: The block's own, which start with their values.
        stored: The names that the block may assign.
    """

    outer: dict[str, CellType]
    own: dict[str, CellType]
    stored: tuple[str, ...]

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
        """Return the block as a function on variables of its own, see ``sharing``."""
        self.outer, self.stored = self.info.variables, self.info.block.stored
        self._fresh = self.info.fresh()
        self.own = self._fresh.variables
        return self.compile_on(self._fresh)

    def execute(self, function: Callable[[], Any]) -> None:
        """Add the block and its input to the trace."""
        self.parent.invokers.append(self)
        self.parent.add(function, self._fresh, self.args, self.kwargs)

    def give_back(self) -> None:
        """Give nothing back yet: the block has not run when its ``with`` statement is left."""

    def finish(self) -> None:
        """Bind what was assigned where the invoke was written."""
        bring_home(self)
        super().give_back()
