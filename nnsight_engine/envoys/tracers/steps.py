"""Loops over the steps of a run: over generated tokens, denoising steps, calls of a recurrent cell.

A loop waits at its head until the step has begun: its body never starts for a step that is not reached.
``with tracer.iter[...]:`` is the older syntax of a loop, whose block runs once per step.
"""

from __future__ import annotations

import ast
import itertools
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from nnsight_engine.core.errors import IterationOver
from nnsight_engine.interleaving.events import MissedProviderError
from nnsight_engine.interleaving.interleaver import Interleaver
from nnsight_engine.tracing.block_names import mangled
from nnsight_engine.tracing.frames import users_stacklevel
from nnsight_engine.tracing.tracer import Tracer

Steps = int | slice | Sequence[int]


class IteratorTracer(Tracer):
    """The steps selected by ``tracer.iter[...]``, to loop over by ``for`` or by ``with``.

    A slice ends where generation does. Steps given by number or list are required.
    """

    def __init__(self, steps: Steps, interleaver: Interleaver) -> None:
        """Select steps; TypeError or ValueError unless by a number, increasing ones, or a forward slice."""
        super().__init__()
        self.open_ended = isinstance(steps, slice)
        self.interleaver = interleaver
        self._numbers = _numbers(steps)

    def __iter__(self) -> Iterator[int]:
        """Yield each step once it has begun; MissedProviderError if a required one was not reached."""
        mediator = self.interleaver.current
        if mediator is None:
            raise ValueError("steps are iterated inside a trace that has an input, or inside an invoke")
        run = mediator.interleaver or self.interleaver  # of its own request, where several share a model
        mediator.loops.append(self)
        try:
            for step in self._numbers:
                if not mediator.await_step(step):
                    if self.open_ended:
                        return
                    raise MissedProviderError(
                        f"Execution complete but step {step} was not reached: generation ended after "
                        f"{run.step + 1} steps. Use a slice, tracer.iter[{step}:], for steps "
                        "that may not be reached."
                    )
                mediator.iteration, mediator.moved_on = step, False
                yield step
        finally:
            mediator.loops.remove(self)
            mediator.iteration, mediator.moved_on = None, False

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
        """Return the variable after ``as``, mangled as its class requires; None unless it is a plain name."""
        origin, context = self.info.block.origin, self.info.block.context
        target = origin.node.items[origin.item].optional_vars
        if not isinstance(target, ast.Name):
            return None
        (name,) = mangled(frozenset({target.id}), context.class_name)
        return name


class Iter:
    """``tracer.iter``: selects steps by number, slice or list."""

    def __init__(self, interleaver: Interleaver) -> None:
        self.interleaver = interleaver

    def __getitem__(self, steps: Steps) -> IteratorTracer:
        return IteratorTracer(steps, self.interleaver)


def _numbers(steps: Steps) -> Iterable[int]:
    """Return the numbers of the selected steps; TypeError or ValueError if they are invalid."""
    if isinstance(steps, slice):
        start, step = steps.start or 0, steps.step if steps.step is not None else 1
        if min(start, steps.stop or 0) < 0 or step < 1:
            raise ValueError(
                f"steps count from 0 and go forward, because their number is unknown; got {steps}"
            )
        return range(start, steps.stop, step) if steps.stop is not None else itertools.count(start, step)
    try:
        numbers = [operator.index(steps)] if hasattr(steps, "__index__") else [*map(operator.index, steps)]
    except TypeError:
        numbers = None
    if numbers is None:
        raise TypeError(f"tracer.iter takes a number, a slice or a list of numbers, got {steps!r}")
    if any(number < 0 for number in numbers) or numbers != sorted(set(numbers)):
        raise ValueError(f"steps count from 0 and must be given in increasing order, got {steps!r}")
    return numbers
