"""The mapping of a block's standard points to vLLM's modules, in the worker.

Points are views of the copies that a block receives (see ``rows``): an edit of a view is written back. The
residual stream of most families is the sum of two tensors. Only if the block has edited the sum does it
replace the pair, as ``(stream, zeros)``; a stream that was only read leaves the model's values unchanged, bit
by bit. Recurrent states are read where vLLM keeps them, right after the mixer's call.

vLLM never computes attention probabilities, so they are computed beside its attention, in float32 (see
``plans.step.read_kernels``). Queries and keys are intercepted at the kernel's input, after rotary embedding
and per-head norms. Earlier keys are only in the engine's KV cache, so if a block reads a layer's pattern from
the prompt on, the layer's keys are stored until it ends.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from nnsight_engine.core import model_spec as leaf_names
from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import RESIDUAL_LEAVES
from nnsight_engine.envoys.architectures.module_points import ModulePoint, PointAccess
from nnsight_engine.envoys.architectures.named_points import (
    EMBED,
    LOGITS,
    NORM,
    PatternError,
    PointValueError,
    StateError,
)
from nnsight_engine.envoys.architectures.views import WHOLE, View
from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.families.layout import Place
from nnsight_engine.interleaving.mediator import Mediator
from nnsight_engine.modeling.generator import WrapperModule
from nnsight_engine.plans.step.read_kernels import AttentionKeyStore, ComputePattern
from nnsight_engine.vllm_backend.hooks import attention_form
from nnsight_engine.vllm_backend.model_points import MixerStates
from nnsight_engine.vllm_backend.traces.points import ATTENTION_INPUT, NORM_INPUT, EnginePoints, Part
from nnsight_engine.vllm_backend.traces.rows import zeros_of

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.families.layout import EngineFamily, Side
    from nnsight_engine.vllm_backend.model_points import ModelPoints
    from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerStatePoint:
    """The state of one mixer after the last position of a step, ``[heads, head_dim, state_size]``.

    ``output`` is the module that returns ``mixer.output``, so that both points can be read in either order.
    """

    name: str
    mixer: Envoy
    output: Envoy
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Wait until the mixer has run, and return a copy; StateError if it runs in another process."""
        module: Any = self.mixer._module  # noqa: SLF001 - an envoy of ours
        if not hasattr(module, "kv_cache"):
            raise StateError(
                f"{self.name} stays in the worker of the layer, and this block runs in another process, of "
                "a sandbox or another pipeline stage. Read it with a `capture` operation, or ask the "
                "operator for a key of the tier 'trusted' on an engine without stages"
            )
        _ = self.output.output
        mediator = self.output.interleaver.current
        assert mediator is not None  # noqa: S101 - it has just been answered
        request: Any = mediator.interleaver
        with torch.inference_mode(mode=False):  # blocks run outside of it, and may edit the copy
            state = MixerStates.of(module).of_request(request.index).view(self.shape)
        request.memory.count_given(state.nbytes)
        return state

    def write(self, value: torch.Tensor) -> NoReturn:
        """Raise StateError: states cannot be written."""
        del value
        raise StateError.unwritable(self.name)


class WorkerPatternPoint:
    """The attention probabilities of one layer, ``[heads, tokens, keys]``; read only."""

    def __init__(self, name: str, kernel: Envoy, num_heads: tuple[int, int], shape: tuple[int, ...]) -> None:
        self.name = name
        self.shape = shape
        self._kernel = kernel
        # Not the module's own numbers, which are those of one rank.
        self._num_heads, self._num_kv_heads = num_heads
        self._key_stores: weakref.WeakKeyDictionary[Mediator, AttentionKeyStore] = weakref.WeakKeyDictionary()

    def read(self) -> torch.Tensor:
        """Wait for the queries and the keys, and return the probabilities.

        PatternError if the attention cannot be recomputed on this rank, the layer shares another layer's
        keys, or keys of earlier steps were not stored.
        """
        module: Any = self._kernel._module  # noqa: SLF001 - an envoy of ours
        args, kwargs = self._kernel.inputs
        query, key = (*args, kwargs.get("query"), kwargs.get("key"))[:2]
        try:
            form = attention_form(module)
        except InterventionError as error:
            raise PatternError(f"{self.name}: {error.message}") from error
        if form.slopes is not None and len(form.slopes) < self._num_heads:
            raise PatternError(f"{self.name}: each rank has the position biases of its own heads only")
        if key is None:
            raise PatternError(f"{self.name}: the layer shares another layer's keys")
        queries = query.reshape(-1, self._num_heads, module.head_size)
        keys = key.reshape(-1, self._num_kv_heads, module.head_size)
        mediator = self._kernel.interleaver.current
        assert mediator is not None  # noqa: S101 - it has just been answered
        start = self._first_position(mediator, len(queries))
        store = self._store(mediator, start, keys)
        rows = torch.arange(len(queries), device=query.device)
        stop = start + len(queries)
        out = torch.zeros(len(queries), self._num_heads, stop, dtype=torch.float32, device=query.device)
        positions = list(range(start, stop))
        ComputePattern(store, form, rows, rows + start, positions, out).run(queries, None)
        return out.transpose(0, 1)

    def write(self, value: torch.Tensor) -> NoReturn:
        """Raise PatternError: probabilities cannot be written."""
        del value
        raise PatternError(
            f"{self.name} cannot be written: vLLM's attention never forms the probabilities, they are "
            "computed beside it. Write attn.q, attn.k or attn.v before it, or attn.heads behind it"
        )

    def _first_position(self, mediator: Mediator, num_rows: int) -> int:
        """Return the position of the first row; a prompt in chunks is given whole at its last chunk."""
        request: Any = mediator.interleaver
        stop: int = request.done + request.batcher.group[1]
        return stop - num_rows

    def _store(self, mediator: Mediator, start: int, keys: torch.Tensor) -> AttentionKeyStore:
        """Add keys from position ``start`` on to the block's store, enlarging it; PatternError at a gap."""
        stop = start + len(keys)
        store = self._key_stores.get(mediator)
        capacity_before = 0 if store is None else store.capacity
        if start and (store is None or store.num_keys < start):
            raise PatternError(
                f"{self.name}: a generated token attends to all positions before it, and the keys of those "
                "were not kept. Read the pattern in every step, from the prompt on"
            )
        if store is None:
            store = self._key_stores[mediator] = AttentionKeyStore(keys.new_empty(2 * stop, *keys.shape[1:]))
        elif store.capacity < stop:
            store.move_to(keys.new_empty(2 * stop, *keys.shape[1:]))
        store.store(start, keys)
        request: Any = mediator.interleaver
        request.memory.keep("keys", (store.capacity - capacity_before) * keys[:1].nbytes)
        return store


_FIRST_LAYER: Final = "layers.0"


@dataclasses.dataclass(frozen=True, slots=True)
class StreamPoint:
    """The output of a block that returns the residual stream as two tensors."""

    name: str
    envoy: Envoy
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Wait for the tensors and return their sum; in-place edits of the sum reach the model."""
        hidden, residual, *rest = self.envoy.output
        with torch.inference_mode(mode=False):  # inference tensors have no version counter
            stream: torch.Tensor = hidden + residual
        mediator = self.envoy.interleaver.current
        if mediator is not None:
            request: Any = mediator.interleaver
            replacement = (stream, torch.zeros_like(residual), *rest)
            request.batcher.lend_computed(self.name, stream, replacement)
        return stream

    def write(self, value: torch.Tensor) -> None:
        """Wait for the tensors and replace both; PointValueError if ``value`` is not a tensor."""
        if not isinstance(value, torch.Tensor):
            raise PointValueError(
                f"{self.name} takes a tensor [tokens, {self.shape[-1]}], got {type(value).__name__}; to "
                "change some of it, edit in place: output[:] = ..."
            )
        # The current value is not read first: a prompt may be computed in chunks.
        self.envoy.output = (value, zeros_of(value))


@dataclasses.dataclass(frozen=True, slots=True)
class EntryPoint:
    """The residual stream as the first block receives it, where no tap lies."""

    name: str
    envoy: Envoy
    family: EngineFamily
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        hidden = self.family.hidden_of(*self.envoy.inputs)
        return hidden[0] if self.family.is_batched else hidden

    def write(self, value: torch.Tensor) -> None:
        """Replace the stream among the first block's arguments, where it is positional or named."""
        if not isinstance(value, torch.Tensor):
            raise PointValueError(f"{self.name} takes a tensor, got {type(value).__name__}")
        args, kwargs = self.envoy.inputs
        whole = value[None] if self.family.is_batched else value
        key = self.family.hidden_key(args)
        if isinstance(key, int):
            self.envoy.inputs = ((*args[:key], whole, *args[key + 1 :]), kwargs)
        else:
            self.envoy.inputs = (args, {**kwargs, key: whole})


@dataclasses.dataclass(frozen=True, slots=True)
class OutputPoint:
    """A stream that is one tensor, with a first axis of 1 if ``is_batched``, or in ``(stream, None)``."""

    point: ModulePoint
    is_batched: bool
    returns_none: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.point.shape

    def read(self) -> torch.Tensor:
        return self.point.read()

    def write(self, value: torch.Tensor) -> None:
        """Replace the value without reading it first, since a prompt may be computed in chunks."""
        if not isinstance(value, torch.Tensor):
            raise PointValueError(f"{self.point.name} takes a tensor, got {type(value).__name__}")
        whole = value[None] if self.is_batched else value
        self.point.envoy.output = (whole, None) if self.returns_none else whole


class WorkerPoints(EnginePoints):
    def __init__(self, root: Envoy, points: ModelPoints, dispatcher: TraceDispatcher) -> None:
        """Offer all points: blocks see whole values, also of sharded tensors."""
        super().__init__(root, points.layout, points.leaf_specs(wholes=True))
        self._model = points
        self._dispatcher = dispatcher

    def _access_of(self, name: str) -> PointAccess:
        """Return the object that reads and writes the named point; raises UnknownPointError."""
        layer, leaf = self._resolved(name)
        shape = self._shape(layer, leaf)
        if leaf == LOGITS:
            return ModulePoint(name, self.root.get(f"{self.root.path}.{LOGITS}"), "output", WHOLE, shape)
        if leaf in {NORM, NORM_INPUT}:
            return self._norm(name, "output" if leaf == NORM else "input", shape)
        if leaf == EMBED:
            return self._residual(name, 0, "input", shape)
        if leaf in RESIDUAL_LEAVES:
            return self._residual(name, layer, "input" if leaf == "input" else "output", shape)
        return self._layer_point(name, layer, leaf, shape)

    def _layer_point(self, name: str, layer: int, leaf: str, shape: tuple[int, ...]) -> PointAccess:
        """Return the access to a point inside a layer; ``leaf`` is its name there, such as ``attn.heads``."""
        block = self.layout.blocks[layer]
        if leaf == leaf_names.PATTERN:
            kernel = self.raw(f"{self.family.layers}.{layer}.{block.kernel}")
            return WorkerPatternPoint(name, kernel, (block.num_heads, block.num_kv_heads), shape)
        if leaf == leaf_names.STATE:
            mixer, output = (
                self.raw(f"{self.family.layers}.{layer}.{block.leaves[candidate].path}")
                for candidate in (leaf, leaf_names.MIXER)
            )
            return WorkerStatePoint(name, mixer, output, shape)
        spec = block.attention_input if leaf == ATTENTION_INPUT else block.leaves[leaf]
        assert spec is not None  # noqa: S101 - the name has been resolved
        envoy = self.raw(f"{self.family.layers}.{layer}.{spec.path}")
        return ModulePoint(name, envoy, spec.side, self._view(spec, layer), shape)

    def _view(self, spec: Place, layer: int) -> View:
        return View(lambda whole: self._model.view(spec, whole, layer), is_all=not spec.part)

    def _rows(self) -> View:
        return View(lambda whole: whole[0]) if self.family.is_batched else WHOLE

    def _norm(self, name: str, side: Side, shape: tuple[int, ...]) -> PointAccess:
        """Return the access to the final norm; an input of two tensors is read as the last layer's output."""
        if side == "input" and self.family.returns_residual:
            return self._residual(name, self._num_layers(), "input", shape)
        envoy = self.raw(self.family.final_norm)
        return ModulePoint(name, envoy, side, self._rows(), shape)

    def _residual(self, name: str, layer: int, side: Side, shape: tuple[int, ...]) -> PointAccess:
        """Return the access to the residual stream at a layer's input or output.

        The first layer's input is read at the tap ``entry``, if there is one.
        """
        if side == "input" and layer:
            layer, side = layer - 1, "output"  # the same value, at a place that has a tap
        if side == "input" and self._dispatcher.entry:
            path = self._dispatcher.entry.removesuffix(".output")
            start = Envoy(WrapperModule(), self.root.interleaver, path, root=self.root)
            point = ModulePoint(name, start, "output", self._rows(), shape)
            return OutputPoint(point, self.family.is_batched, returns_none=False)
        envoy = self.raw(f"{self.family.layers}.{layer}")
        if side == "input":
            return EntryPoint(name, envoy, self.family, shape)
        if self.family.returns_residual:
            return StreamPoint(name, envoy, shape)
        point = ModulePoint(name, envoy, side, self._rows(), shape)
        return OutputPoint(point, self.family.is_batched, returns_none=self.family.returns_none)

    def skip(self, part: Part, raw: Envoy, value: Any) -> None:
        """Use ``value`` as the output of a layer or its part, whose module has the envoy ``raw``."""
        output = self._in_form(value, is_layer=part.place.rpartition(".")[2].isdecimal())
        if part.place == _FIRST_LAYER and self._dispatcher.entry:
            # Its input comes from a tap inside it, when its call can no longer be skipped.
            raw.output = output
        else:
            raw.skip(output)

    def _in_form(self, value: Any, *, is_layer: bool) -> Any:
        """Return the block's tensor in the form in which the module returns its output."""
        if not isinstance(value, torch.Tensor):
            return value
        if is_layer and self.family.returns_residual:
            return (value, zeros_of(value))
        is_short = self.family.is_batched and value.ndim == len(("tokens", "width"))
        whole = value[None] if is_short else value
        return (whole, None) if is_layer and self.family.returns_none else whole
