"""One input of a batch and the block that sees its rows."""

from __future__ import annotations

from collections.abc import Callable
from types import CellType
from typing import TYPE_CHECKING, Any

from nnsight_engine.core.cells import copied
from nnsight_engine.interleaving.sharing import bring_home
from nnsight_engine.tracing.tracer import Tracer

if TYPE_CHECKING:
    from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer


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
                "Cannot invoke during an active model execution / interleaving. Invokes stand side by "
                "side in a trace without an input of its own: `with model.trace() as tracer:`."
            )
        super().__init__(*args, **kwargs)
        self.parent = parent

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's positional and keyword arguments for this input alone: tokenized, not padded."""
        args, kwargs, _ = self.parent.model._prepare_input(*self.args, **self.kwargs)
        return args, kwargs

    def compile(self) -> Callable[[], Any]:
        """Return the block as a function on variables of its own, see ``sharing``."""
        info = self.info
        self.outer, self.stored, self.own = info.variables, info.block.stored, copied(info.variables)
        return self.compile_on(info, self.own)

    def execute(self, function: Callable[[], Any]) -> None:
        """Add the block and its input to the trace."""
        self.parent.invokers.append(self)
        self.parent.add(function, self.info, self.args, self.kwargs)

    def _run(self) -> None:
        """Leave the block to the trace around it, which runs all of its invokes together."""
        self._read_variables()
        self.execute(self.compile())

    def finish(self) -> None:
        """Bind what was assigned where the invoke was written."""
        bring_home(self)
        self.give_back()
        self.own.clear()
