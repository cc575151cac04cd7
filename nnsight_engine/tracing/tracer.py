"""The base context manager of all traces: it skips its block, compiles it and passes it to a backend."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import CellType, FrameType, FunctionType, TracebackType
from typing import TYPE_CHECKING, Any

from nnsight_engine.core.closure_cells import UNBOUND, Assignments, content, copied
from nnsight_engine.core.config import CONFIG
from nnsight_engine.core.object_methods import MountError, mount
from nnsight_engine.core.saves import SAVES, save
from nnsight_engine.tracing.blocks import DEFERRED, HELPERS, Block
from nnsight_engine.tracing.counted_stores import BIND, OWN
from nnsight_engine.tracing.frames import (
    BlockSkipped,
    clean,
    drop_callers,
    for_user,
    read_variables,
    skip_block,
    write_variables,
)
from nnsight_engine.tracing.loaded_code import sent_name
from nnsight_engine.tracing.source_text import SourceReader, WithBlockNotFoundError
from nnsight_engine.tracing.trace_sites import TraceSite, TraceSites

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy

SITES = TraceSites(SourceReader())
"""The process's trace sites; code objects are per process, and so is this."""


class Info:
    """The place of a block and its variables.

    Attributes:
        frame: The frame that opened the trace, until it ends; like ``site`` None for a block inside a block,
            which shares cells instead.
        wanted: Names that code around the block may read after it has run, saved or not; in a session only.
        assignments: The counter of assignments of the code around the block; None if they are not counted.
    """

    __slots__ = ("assignments", "block", "frame", "globals_", "site", "variables", "wanted")

    def __init__(
        self,
        block: Block,
        variables: dict[str, CellType],
        frame: FrameType | None,
        globals_: dict[str, Any],
        site: TraceSite | None = None,
    ) -> None:
        """Note a block on cells by name; ``frame`` and ``site`` are None for a block inside a block."""
        self.site = site
        self.block = block
        self.variables = variables
        self.frame = frame
        self.globals_ = globals_
        self.wanted: frozenset[str] = frozenset()
        self.assignments: Assignments | None = None

    @property
    def source(self) -> list[str]:
        """The block's lines as written."""
        return self.block.text.splitlines()

    @property
    def start_line(self) -> int:
        """Line of the block's first statement in its file, from 1."""
        return self.block.line

    @property
    def filename(self) -> str:
        """The file that the block is written in."""
        return sent_name(self.block.source.filename)

    def fresh(self) -> Info:
        """Return the same block on new cells, which hold the current values."""
        return Info(self.block, copied(self.variables), None, self.globals_)


class Tracer:
    """A ``with`` statement whose block is skipped, to be run by a backend.

    Subclasses override ``execute``; they may override ``compile`` to wrap the function, and ``capture``.

    Attributes:
        backend: Called with the tracer when the block is left. A backend that does not wait is later called
            without arguments, to return its result.
        info: The block; set by ``capture``.
    """

    info: Info
    deferred = False
    shares_all = False
    """Whether the surrounding block gets all variables that nested blocks assign, saved or not."""
    _unstored_target: str | None = None
    _restore_tracing: Callable[[], None] | None = None
    _nested_block: tuple[Block, dict[str, CellType], _Binder, frozenset[str]] | None = None

    def __init__(self, *args: Any, backend: Backend | None = None, **kwargs: Any) -> None:
        """Keep the arguments for ``execute``.

        Args:
            *args: Positional arguments of the function that will be traced.
            backend: Runs the compiled block; by default it runs here.
            **kwargs: Keyword arguments of the function that will be traced.
        """
        self.args = args
        self.kwargs = kwargs
        self.backend: Backend = backend if backend is not None else _EXECUTE

    def capture(self, frame: FrameType) -> None:
        """Find the block that ``frame`` is entering, or raise a ``WithBlockNotFoundError``."""
        if self._nested_block is not None:
            (block, cells, binder, wanted), self._nested_block = self._nested_block, None
            self.info = Info(block, cells, None, binder.info.globals_)
            self.info.assignments = binder.assignments
            self.info.wanted = wanted & frozenset(block.stored)
            return
        site = SITES.known_site(frame)
        if site is None:
            frame = SITES.entering(frame)
            site = SITES.find(frame)
        self.info = Info(site.block, {}, frame, frame.f_globals, site)
        self._unstored_target = site.block_exit.binds
        if not site.does_nothing:
            self._restore_tracing = skip_block(frame, site.block_exit)

    def compile(self) -> Callable[[], Any]:
        """Return the block as a function without arguments."""
        return self.compile_on(self.info)

    def compile_on(self, info: Info, variables: dict[str, CellType] | None = None) -> Callable[[], Any]:
        """Return the block as a function, on the variables of ``info`` or on others."""
        if variables is None:
            variables = info.variables
        outer_assignments = info.assignments
        assignments = outer_assignments.inside(variables) if outer_assignments is not None else None
        return compiled(info, variables, shares_all=self.shares_all, assignments=assignments)

    def execute(self, function: Callable[[], Any]) -> Any:
        """Run the compiled block; in this class, without a model."""
        return function()

    def give_back(self) -> None:
        """Bind the saved values in the frame that opened the trace; a nested block shares its variables."""
        frame, site = self.info.frame, self.info.site
        if frame is None or site is None:
            return
        keeps = SAVES.keeps
        saved: dict[str, Any] = {}
        for name in self.info.block.stored:
            value = content(self.info.variables[name])
            if value is not UNBOUND and keeps(value):
                saved[name] = value
        write_variables(frame, saved, site.module_names)
        # A tracer outlives its trace; values that were not saved, and the frame, must not.
        self.info.variables.clear()
        self.info.frame = None

    def __enter__(self) -> Any:
        """Capture the block and skip it."""
        try:
            self.capture(sys._getframe(1))  # noqa: SLF001 - the frame is what a trace is about
        except (WithBlockNotFoundError, SyntaxError) as error:
            raise for_user(error) from error.__cause__
        self.deferred = True
        return self.entered()

    def entered(self) -> Any:
        """Return the value that ``as`` binds: the tracer; subclasses may return another one."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Pass the block to the backend; raise its errors without our frames."""
        __tracebackhide__ = True
        if self._restore_tracing is not None:
            self._restore_tracing()
        if kind is not None and not issubclass(kind, BlockSkipped):
            return False
        failed = self._outcome()
        if failed is None:
            return True
        if not CONFIG.APP.DEBUG:
            drop_callers(sys._getframe(1))  # noqa: SLF001 - the frame that the error will reach
        context = failed.__context__
        try:
            raise failed
        finally:  # raising here set the exception that skipped the block as the error's context
            failed.__context__ = context

    def _outcome(self) -> BaseException | None:
        """Run the block; return its error for the user, None without one."""
        try:
            self._run()
        except BaseException as failed:  # noqa: BLE001 - raised by __exit__, whatever it is
            return clean(failed, debug=CONFIG.APP.DEBUG)
        return None

    def _read_variables(self) -> None:
        """Fill the block's cells from its frame; called at exit, since ``as tracer`` is bound after entry."""
        info = self.info
        if info.frame is None or info.site is None:
            return
        if self._unstored_target is not None:
            write_variables(info.frame, {self._unstored_target: self.entered()})
        values = read_variables(info.frame)
        for name in info.site.names:
            info.variables[name] = CellType(values[name]) if name in values else CellType()

    def _run(self) -> Any:
        """Have the backend run the block, and give the saved values to the surrounding code."""
        self._read_variables()
        SAVES.enter()
        try:
            result = self.backend(self)
            SAVES.check()
            return result
        finally:  # for any backend, and for values saved before an error too
            try:
                self.give_back()
            finally:
                SAVES.exit()


class Session(Tracer):
    """``with model.session():``; the block runs as plain code, its traces one after the other.

    The traces share the session's variables, so that a trace can use the values of earlier ones without
    saving them. Values that are used after the session must be saved.
    """

    shares_all = True

    def __init__(self, model: Envoy, *, backend: Backend | None = None) -> None:
        """Open a session on a model; ``backend`` runs all of it."""
        super().__init__(backend=backend)
        self.model = model


class Backend:
    """The base of backends; called with the tracer when its ``with`` statement is left.

    A subclass calls ``super().__call__(tracer)`` to get the compiled function, and runs or sends it.
    """

    def __call__(self, tracer: Tracer | None = None) -> Any:
        """Compile the tracer's block."""
        if tracer is None:
            raise TypeError(f"{type(self).__name__} has nothing to give after the trace; it runs at once")
        return tracer.compile()


class ExecutionBackend(Backend):
    """Runs the block in this process, at once."""

    def __call__(self, tracer: Tracer | None = None) -> Any:
        """Run the block."""
        function = super().__call__(tracer)
        return tracer.execute(function) if tracer is not None else None


def refuse_statement(frame: FrameType, name: str) -> None:
    """Refuse a call whose result is dropped: nothing would run, without an error."""
    if SITES.result_is_dropped(frame):
        raise for_user(
            WithBlockNotFoundError(
                f"With block not found at line {frame.f_lineno} of {sent_name(frame.f_code.co_filename)}: "
                f"{name}() opens a trace and does nothing by itself; write `with model.{name}(...):` and the "
                "block under it."
            )
        )


def _can_save() -> bool:
    """Return whether values have ``.save()`` now: within a trace of this thread, unless configured away."""
    return SAVES.depth > 0 and CONFIG.APP.PYMOUNT


_EXECUTE = ExecutionBackend()
"""The default backend of every trace; it has no state."""


def compiled(
    info: Info,
    variables: dict[str, CellType],
    *,
    shares_all: bool = False,
    assignments: Assignments | None = None,
) -> Callable[[], Any]:
    """Return a block as a function on these cells; by default its assignments are not counted."""
    block, helpers = info.block, dict[str, CellType]()
    if assignments is not None:
        block = block.counting()
        helpers[OWN] = CellType(assignments)
        for name in block.stored:
            assignments.cells.setdefault(name, CellType())
    if block.nested:
        helpers[BIND] = CellType(_Binder(info, assignments, shares_all=shares_all))
    return block.function(variables, helpers, info.globals_)


class _Binder:
    """Passes the variables of a block to the traces nested in it."""

    __slots__ = ("assignments", "info", "shares_all")

    def __init__(self, info: Info, assignments: Assignments | None, *, shares_all: bool) -> None:
        self.info = info
        self.assignments = assignments
        self.shares_all = shares_all

    def __call__(self, capture: FunctionType, index: int, value: Any) -> Any:
        """Give a tracer, the context ``value``, the block and cells of its ``with``; return the context."""
        if isinstance(value, Tracer):
            names, outer_info = capture.__code__.co_freevars, self.info
            cells = dict(zip(names, capture.__closure__ or ()))  # noqa: B905 - equally long, and this is faster
            block = outer_info.block.inner(index, names)
            wanted = outer_info.block.used_after(index) if self.shares_all else outer_info.wanted
            value._nested_block = (block, cells, self, wanted)  # noqa: SLF001 - a tracer's own part
        return value


def _deferred(value: Any) -> bool:
    return isinstance(value, Tracer) and value.deferred


HELPERS[DEFERRED] = CellType(_deferred)
try:
    mount("save", save, when=_can_save)
except MountError as error:  # another library's method is there already
    warnings.warn(f"values have no `.save()` of ours, use save(value): {error}", stacklevel=1)

__all__ = [
    "SITES",
    "Backend",
    "ExecutionBackend",
    "Info",
    "Session",
    "Tracer",
    "WithBlockNotFoundError",
    "compiled",
    "refuse_statement",
]
