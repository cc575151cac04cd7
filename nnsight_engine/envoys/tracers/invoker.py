from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from types import CellType
from typing import TYPE_CHECKING, Any

from nnsight_engine.core.closure_cells import UNBOUND, Assignments, content, copied
from nnsight_engine.tracing.tracer import Tracer, compiled

if TYPE_CHECKING:
    from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer


class Invoker(Tracer):
    """``with tracer.invoke(input):``, defined now and run with the others when the trace's block ends.

    ``own`` has the block's variables, initialized with the surrounding ones, whose ``identities`` change when
    the surrounding code assigns them between invokes.
    """

    identities: Mapping[str, Hashable]
    own: dict[str, CellType]
    stored: tuple[str, ...]
    assignments: Assignments

    def __init__(self, parent: InterleavingTracer, *args: Any, **kwargs: Any) -> None:
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
        info = self.info
        self.stored, self.own = info.block.stored, copied(info.variables)
        self.identities = {name: self._identity(cell) for name, cell in info.variables.items()}
        self.assignments = Assignments(self.own)
        return compiled(info, self.own, assignments=self.assignments)

    def _identity(self, cell: CellType) -> tuple[int, int]:
        around = self.info.assignments
        return id(cell), 0 if around is None else around.of(cell)

    def execute(self, function: Callable[[], Any]) -> None:
        self.parent.invokers.append(self)
        self.parent.add(function, self.info, self.args, self.kwargs)

    def _run(self) -> None:
        self._read_variables()
        self.execute(self.compile())

    def finish(self) -> None:
        """Assign the block's variables in the surrounding code, unless that code has assigned them since."""
        for name, cell in self.info.variables.items():
            if self.assignments[name] and self.identities[name] == self._identity(cell):
                value = content(self.own[name])
                if value is not UNBOUND:
                    cell.cell_contents = value
                elif content(cell) is not UNBOUND:
                    del cell.cell_contents
        self.give_back()
        self.own.clear()
