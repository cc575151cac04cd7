"""A trace interleaved with a model run: its blocks wait for values while the model computes them."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import CellType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch

from nnsight_engine.core.closure_cells import UNBOUND, Assignments, content, copied
from nnsight_engine.core.config import CONFIG
from nnsight_engine.core.gradients import missing_graph_reason
from nnsight_engine.core.saves import save
from nnsight_engine.core.trees import map_tensors
from nnsight_engine.envoys.cache import Cache, CacheView
from nnsight_engine.envoys.eproperty import eproperty
from nnsight_engine.envoys.missed_values import CacheMisses, explain_missed
from nnsight_engine.envoys.tracers.steps import Iter, IteratorTracer
from nnsight_engine.interleaving.events import MissedProviderError
from nnsight_engine.interleaving.gradients import GradientSession
from nnsight_engine.interleaving.interleaver import Interleaver
from nnsight_engine.interleaving.mediator import Mediator
from nnsight_engine.interleaving.shared_variables import Barrier, Sharer, exchanges, explain
from nnsight_engine.tracing.frames import for_user, users_stacklevel
from nnsight_engine.tracing.tracer import SITES, Backend, Info, Tracer, compiled

if TYPE_CHECKING:
    import torch

    from nnsight_engine.envoys.envoy import Envoy


class Invoker(Tracer):
    """``with tracer.invoke(input):``, defined now and run with the others when the trace's block ends.

    ``cells`` are the block's variables, initialized with the surrounding ones, whose ``identities`` change
    when the surrounding code assigns them between invokes.
    """

    identities: Mapping[str, Hashable]
    cells: dict[str, CellType]
    stored: tuple[str, ...]
    assignments: Assignments

    def __init__(self, parent: InterleavingTracer, *args: Any, **kwargs: Any) -> None:
        """Create an invoke of the trace ``parent``, with its input; ValueError while the model runs."""
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
        """Compile the block on copies of its variables; assignments are counted, for the other invokes."""
        info = self.info
        self.stored, self.cells = info.block.stored, copied(info.variables)
        self.identities = {name: self._identity(cell) for name, cell in info.variables.items()}
        self.assignments = Assignments(self.cells)
        return compiled(info, self.cells, assignments=self.assignments)

    def _identity(self, cell: CellType) -> tuple[int, int]:
        outer_assignments = self.info.assignments
        return id(cell), 0 if outer_assignments is None else outer_assignments.count_of(cell)

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
                value = content(self.cells[name])
                if value is not UNBOUND:
                    cell.cell_contents = value
                elif content(cell) is not UNBOUND:
                    del cell.cell_contents
        self.give_back()
        self.cells.clear()


class DefinedInvoke(Sharer, Protocol):
    info: Info
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def finish(self) -> None: ...


class InterleavingTracer(Tracer):
    """``with model.trace(input) as tracer:`` and the methods of ``tracer``.

    With an input, the block is the only invoke. Without one, the block runs as plain code and defines
    invokes.

    Attributes:
        caches_inputs: Whether caches store inputs by default.
    """

    path: str | None = None
    caches_inputs: ClassVar[bool] = True

    def __init__(
        self,
        function: Callable[..., Any],
        model: Envoy,
        *args: Any,
        backend: Backend | None = None,
        validate: bool = False,
        **kwargs: Any,
    ) -> None:
        """Trace ``function``, called with the combined inputs of the invokes.

        Args:
            function: Runs the model.
            model: The envoy whose tree is traced.
            *args: The input, if there is one.
            backend: Runs the compiled block.
            validate: Run the blocks on fake tensors first, so that wrong shapes fail before the real run.
            **kwargs: With an input, its keyword arguments; without, the function's for all invokes together.
        """
        super().__init__(*args, backend=backend, **kwargs)
        self.function = function
        self.model = model
        self.validate = validate
        self.mediators: list[Mediator] = []
        self.invokers: list[DefinedInvoke] = []
        self.barriers: list[Barrier] = []
        self.caches: list[CacheMisses] = []
        self.batcher = model._new_batcher()

    @property
    def interleaver(self) -> Interleaver:
        """The interleaver that the model's values pass through."""
        return self.model.interleaver

    @eproperty(description="result", iterate=False)
    def result(self) -> Any:
        """The return value of the traced function: the model's output, or the generated tokens."""

    # Called by blocks.

    def invoke(self, *args: Any, **kwargs: Any) -> Invoker:
        """Add an input to the batch, with a block that sees its rows; without arguments, all rows.

        Raises:
            ValueError: The model is already running.
        """
        return Invoker(self, *args, **kwargs)

    @property
    def iter(self) -> Iter:
        """Loops over generation steps: ``for step in tracer.iter[:]``."""
        return Iter(self.interleaver)

    def all(self) -> IteratorTracer:
        """Loop over every step, ``tracer.iter[:]``."""
        return IteratorTracer(slice(None), self.interleaver)

    def next(self, step: int = 1) -> Self:
        """Move this block's requests on by ``step`` generation steps."""
        self.model.next(step)
        return self

    def stop(self) -> None:
        """End the run here: neither the rest of the block nor the rest of the model runs."""
        mediator = self.interleaver.current
        if mediator is None:
            raise for_user(
                ValueError("stop() is called inside a trace that has an input, or inside an invoke")
            )
        mediator.stop()

    def barrier(self, n_participants: int) -> Barrier:
        """Create a barrier for this many invokes; each invoke that calls it waits there for the others."""
        barrier = Barrier(self.interleaver, n_participants)
        self.barriers.append(barrier)
        return barrier

    def local(self) -> Tracer:
        """Run a part of a block in the client's process: ``with tracer.local():``; in a local trace, here.

        Raises:
            LocalBlockError: The block runs elsewhere and cannot call back.
        """
        return self.model._root._new_local_part()

    def cache(
        self,
        modules: Sequence[Envoy | str] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        detach: bool = True,
        include_output: bool = True,
        include_inputs: bool | None = None,
    ) -> CacheView:
        """Store the values of many modules, as they are after the blocks' edits, from here on.

        Args:
            modules: Envoys or their paths; all by default.
            device: Device to store tensors on; their own by default.
            dtype: Dtype to convert floating-point tensors to.
            detach: Detach them from autograd.
            include_output: Store outputs.
            include_inputs: Store inputs; by default yes, except in vLLM, where they count towards a limit.

        Returns:
            The values, ``cache["model.layers.3"].output`` or ``cache.model.layers[3].output``; of a module
            that is called several times also ``cache.model.lm_head[2].output``.
        """
        mediator = self.interleaver.current
        if mediator is None or mediator.interleaver is None:
            raise for_user(
                ValueError("a cache is made inside a trace that has an input, or inside an invoke")
            )
        if include_inputs is None:
            include_inputs = self.caches_inputs
        cache = self._new_cache(device=device, dtype=dtype, detach=detach)
        keys = [key for key, wanted in (("input", include_inputs), ("output", include_output)) if wanted]
        cache.watch(mediator.interleaver, self.model, modules, keys)
        self._note_cache(CacheMisses(cache, self.model, modules, keys, mediator.interleaver))
        return save(cache.view(self.model))

    def _note_cache(self, cache: CacheMisses) -> None:
        self.caches.append(cache)

    def _new_cache(
        self, *, device: torch.device | str | None, dtype: torch.dtype | None, detach: bool
    ) -> Cache:
        return Cache(device=device, dtype=dtype, detach=detach)

    @property
    def attention_mask(self) -> torch.Tensor:
        """The mask of this block's rows, 1 for tokens and 0 for padding: ``[rows, positions]``.

        Shorter texts of a batch are padded, those of language models on the left: ``output[:, 0]`` and
        ``.mean(1)`` then include padding.

        Raises:
            ValueError: The model's input has no such mask, or no block of a trace is running.
        """
        mediator = self.interleaver.current
        mask = self.batcher.attention_mask
        if mediator is None or mask is None:
            raise for_user(
                ValueError(
                    "attention_mask, lengths and first_positions are for blocks of a running trace of a "
                    "model whose inputs are filled up to one length, such as LanguageModel with text"
                )
            )
        if self._moves_filling() and not bool(mask[:, -1].all()):
            raise ValueError(
                "generation moves filling to the left of each row, and this tokenizer puts it on the right: "
                "set model.tokenizer.padding_side = 'left' for attention_mask, lengths and first_positions"
            )
        rows = mask if mediator.batch_group is None else mask.narrow(0, *mediator.batch_group)
        return rows.to(getattr(self.model._root, "device", None) or rows.device)

    def _moves_filling(self) -> bool:
        """Return whether the run generates with a decoder, which moves padding to the left."""
        config = getattr(self.model._root._module, "config", None)
        is_decoder = not getattr(config, "is_encoder_decoder", False)
        generates = "generate" in getattr(self.function, "__name__", "") or any(
            kwargs.get("max_new_tokens") is not None
            for kwargs in (self.kwargs, self.batcher.shared_kwargs, (self.batcher.inputs or ((), {}))[1])
        )
        return is_decoder and generates

    @property
    def lengths(self) -> torch.Tensor:
        """Number of tokens in each of this block's rows, ``[rows]``; see ``attention_mask``."""
        return self.attention_mask.sum(-1)

    @property
    def first_positions(self) -> torch.Tensor:
        """Position of the first token in each of this block's rows, ``[rows]``; see ``attention_mask``."""
        return self.attention_mask.argmax(-1)

    # Running.

    def compile(self) -> Callable[[], Any]:
        """Compile the block; one that defines invokes counts assignments, which invokes compare."""
        info = self.info
        if info.assignments is None and not self.model._has_input(self.args, self.kwargs):
            info.assignments = Assignments(info.variables)
        return super().compile()

    def add(
        self, function: Callable[[], Any], info: Info, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Add an invoke: its input to the batch, and a mediator for its block."""
        group = self.batcher.add(self.model, args, kwargs)
        self.mediators.append(Mediator(function, info, batch_group=group))

    def execute(self, function: Callable[[], Any]) -> Any:
        """Run the model interleaved with the blocks; ValueError if it is already running, or has no input."""
        with self.collected(function):
            try:
                if self.validate:
                    self._validate()
                self._share(self.mediators, self.invokers)
                result = self._run_model()
                self._warn_of_misses()
                return result  # noqa: TRY300 - a filter may turn the warning into an error of the trace
            except MissedProviderError as error:
                explain_missed(error, self.model._root)
                raise
            except NameError as error:
                explain(error, [invoker.stored for invoker in self.invokers])
                raise

    @contextlib.contextmanager
    def collected(self, function: Callable[[], Any]) -> Iterator[None]:
        """Collect the blocks and inputs of the trace, to run them here or to send them elsewhere.

        At the end, the invokes' own variables are assigned in the code around the invokes. ValueError as in
        ``execute``.
        """
        with self.interleaver.exclusive:
            if self.interleaver.interleaving:
                raise ValueError(
                    f"Cannot trace {self.model.path} during an active model execution / interleaving: it "
                    "runs already, and this block waits beside it. Open the trace before or after, or "
                    "group traces in model.session()."
                )
            self._collect(function)
            try:
                yield
            finally:
                for invoker in self.invokers:
                    invoker.finish()
                self._release()

    def _warn_of_misses(self) -> None:
        """Warn of the values that caches should have and did not get."""
        for cache in self.caches:
            message = cache.warning()
            if message is not None:
                self._warn(message)

    def _warn(self, message: str) -> None:
        warnings.warn(message, stacklevel=users_stacklevel())

    def _release(self) -> None:
        """Drop blocks, inputs and values of the run, since a tracer outlives its trace."""
        self.interleaver.forget()
        self.mediators.clear()
        self.invokers.clear()
        self.barriers.clear()
        self.caches.clear()
        self.batcher.forget()

    def _collect(self, function: Callable[[], Any]) -> None:
        """Add the block as the only invoke; without an input, run it, so that it defines invokes."""
        if self.model._has_input(self.args, self.kwargs):
            self.add(function, self.info, self.args, self.kwargs)
        else:
            self.batcher.shared_kwargs = self.kwargs
            function()
        self._check_input()

    def _check_input(self) -> None:
        if self.batcher.inputs is None:
            raise ValueError(
                "The model did not execute: there is no input. Give one to the trace, `with "
                "model.trace(input):`, or to an invoke in it, `with tracer.invoke(input):`."
                + (f" {', '.join(self.kwargs)} alone would be for all invokes." if self.kwargs else "")
            )

    def _run_model(self) -> Any:
        self.model._prepare_run(self.batcher)
        return self._interleave()

    def _interleave(self, converted: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
        """Run the model with edits and blocks; ``converted`` turns the inputs into fake tensors."""
        interleaver, model = self.interleaver, self.model
        mediators = [edit.mediator(interleaver) for edit in self.edits]
        interleaver.initialize([*mediators, *self.mediators], self, self.batcher)
        self._on_initialized()
        inputs = self.batcher.inputs
        assert inputs is not None  # noqa: S101 - set by _collect
        args, kwargs = inputs if converted is None else map_tensors(inputs, converted)
        return model.interleave(self.function, *args, **{**self.batcher.shared_kwargs, **kwargs})

    @property
    def edits(self) -> Sequence[Edit]:
        """The edits that run in every trace of the model."""
        model = self.model
        return model._default_mediators if model._is_root else model._root._default_mediators

    def _on_initialized(self) -> None:
        """Make further preparations once the interleaver has its blocks."""

    def _shares_variables(self) -> bool:
        return CONFIG.APP.CROSS_INVOKER

    def _share(self, mediators: Sequence[Mediator], sharers: Sequence[Sharer]) -> None:
        if len(sharers) > 1 and self._shares_variables():
            for mediator, exchange in zip(mediators, exchanges(sharers), strict=True):
                mediator.exchange = exchange

    def _validate(self) -> None:
        """Run copies of the blocks on fake tensors, which raises the errors of wrong shapes."""
        real = self.mediators
        copies = [_DryRun(invoker.info, invoker.identities, invoker.cells) for invoker in self.invokers] or [
            _DryRun(self.info, {}, self.info.variables)
        ]
        self.mediators = [
            Mediator(
                compiled(invoker.info, invoker.cells, assignments=invoker.assignments),
                invoker.info,
                batch_group=mediator.batch_group,
            )
            for invoker, mediator in zip(copies, real, strict=True)
        ]
        self._share(self.mediators, copies)
        try:
            run_on_fakes(self._interleave)
        finally:
            self.mediators = real
            self.caches.clear()


class _DryRun:
    """Copies of a block's variables for a run on fake tensors, which leaves the real ones unchanged."""

    def __init__(self, info: Info, identities: Mapping[str, Hashable], cells: Mapping[str, CellType]) -> None:
        """Copy the variables of one block; ``identities`` tell which of them other invokes have too."""
        self.info = info
        self.identities = identities
        self.cells = copied(cells)
        self.stored = info.block.stored
        self.assignments = Assignments(self.cells)


def run_on_fakes(run: Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]) -> Any:
    """Call ``run`` with a function that converts real tensors to fake ones: no numbers, no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 - slow to import, rarely needed

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return run(mode.from_tensor)


class _Recorder:
    """Stores each module's first values on its envoy, to be read after the scan."""

    def __init__(self, envoys: dict[str, Any]) -> None:
        self.envoys = envoys

    def add(self, provider: str, iteration: int | None, value: Any) -> None:
        path, _, key = provider.rpartition(".")
        if not iteration:
            self.envoys[path]._fake[key] = value


class ScanningTracer(InterleavingTracer):
    """``with model.scan(input):``; afterwards, envoys return fake values outside a trace."""

    def _run_model(self) -> Any:
        return run_on_fakes(self._interleave)

    def _on_initialized(self) -> None:
        envoys = {str(envoy.path): envoy for envoy in self.model._walk()}
        watched = [f"{path}.{key}" for path in envoys for key in ("input", "output")]
        self.interleaver.watch(_Recorder(envoys), watched)


class BackwardsTracer(Tracer):
    """A backward pass whose block waits for ``tensor.grad`` and may assign it.

    Gradients arrive in the reverse order of the forward pass and must be requested in that order. A pass
    inside a trace has its own interleaver: the model is paused meanwhile and provides no values.
    """

    def __init__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Prepare ``tensor.backward(*args, **kwargs)``, which runs when the block is left."""
        super().__init__(*args, **kwargs)
        self.tensor = tensor

    def execute(self, function: Callable[[], Any]) -> None:
        """Run pass and block alternately, on this thread; torch's autograd threads have other stacks."""
        reason = missing_graph_reason(self.tensor)
        if reason is not None:
            raise RuntimeError(f"there is nothing to go back through from this tensor: {reason}")
        mediator = Mediator(function, self.info)
        interleaver = Interleaver([mediator], self)
        with GradientSession(interleaver, mediator), torch.autograd.set_multithreading_enabled(mode=False):
            try:
                interleaver.run(lambda: _backward(self.tensor, *self.args, **self.kwargs))
            finally:
                # otherwise it would keep the block's tensors alive, and with them the graph
                interleaver.forget()


_backward: Callable[..., None] = torch.Tensor.backward


@functools.wraps(_backward)
def _traceable_backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if SITES.feeds_with(sys._getframe(1)):
        return BackwardsTracer(self, *args, **kwargs)
    return _backward(self, *args, **kwargs)


def install() -> None:
    """Patch ``torch.Tensor.backward``: ``with tensor.backward():`` opens a trace, other calls do not."""
    torch.Tensor.backward = _traceable_backward  # type: ignore[method-assign] # the patch is intended


class Edit:
    """A stored block. Each trace runs it on fresh variables, once for every step."""

    def __init__(self, tracer: Tracer, info: Info) -> None:
        self.tracer = tracer
        self.info = info.fresh()

    def mediator(self, interleaver: Interleaver) -> Mediator:
        """Return the mediator that runs the edit in one trace; it sees the whole batch."""
        info = self.info.fresh()
        function = self.tracer.compile_on(info)

        def every_step() -> None:
            for _ in IteratorTracer(slice(None), interleaver):
                function()

        return Mediator(every_step, info, name="edit")


class EditingTracer(Tracer):
    """``with model.edit() as edited:``; the block runs in each trace of ``edited``."""

    def __init__(self, model: Envoy, *, inplace: bool = False, backend: Backend | None = None) -> None:
        super().__init__(backend=backend)
        self.model = model if inplace else model._shallow_copy()

    def execute(self, function: Callable[[], Any]) -> None:  # noqa: ARG002 - compiled again in each trace
        self.model._default_mediators.append(Edit(self, self.info))

    def entered(self) -> Envoy:
        return self.model
