"""Calls of modules by untrusted blocks: which modules and arguments are accepted, and the computation.

vLLM's kernels trust their callers: an index out of range or a wrong width makes them read or write memory of
other requests. So all submodules must be known to be safe (linear layers, norms, activations, embeddings).
The argument must be one tensor of rows (and the residual that a norm may add), with the width and dtype that
the model uses and no more rows than a step of the engine may have. The result must fit into a message.

A call is computed in parts of few rows, between which the engine can do other work. The number of rows
depends on the module alone, so that the same call returns bitwise the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from nnsight_engine.core.trees import map_tensors, tensors
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.model_points import ModelPoints, base_module
from nnsight_engine.vllm_backend.traces.block_adapters import BlockAdapters
from nnsight_engine.vllm_backend.traces.errors import SandboxedError
from nnsight_engine.vllm_backend.traces.model import WorkerModel
from nnsight_engine.vllm_backend.traces.remote_modules import weight_width
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher

_PART_WORK: Final = 2**30
"""Multiplications of one part: a few milliseconds."""
_MIN_ROWS: Final = 16


def rows_at_once(row_work: int) -> int:
    """Return the number of rows of a part, given the multiplications per row."""
    return max(_MIN_ROWS, _PART_WORK // max(row_work, 1))


class ModuleCall:
    """A call in progress; ``args`` are rows ``[..., width]`` or tokens, all with the same axes of rows."""

    def __init__(
        self,
        path: str,
        apply: Callable[..., Any],
        args: Sequence[torch.Tensor],
        num_axes: int,
        part_rows: int,
    ) -> None:
        """Prepare to call ``apply`` with up to ``part_rows`` rows at once.

        The first ``num_axes`` axes of the arguments are axes of rows.
        """
        self.path = path
        self._apply = apply
        self._row_shape = args[0].shape[:num_axes]
        self.num_rows = self._row_shape.numel()
        self.num_done = 0
        self.part_rows = part_rows
        self._is_whole = self.num_rows <= part_rows
        self._args = list(args)
        if not self._is_whole:
            self._args = [arg.reshape(self.num_rows, *arg.shape[num_axes:]) for arg in args]
        self._parts: list[Any] = []

    @property
    def is_done(self) -> bool:
        return bool(self._parts) and self.num_done >= self.num_rows

    def advance(self) -> None:
        """Compute the next part: up to ``part_rows`` rows."""
        start = self.num_done
        args = self._args if self._is_whole else [arg[start : start + self.part_rows] for arg in self._args]
        with torch.inference_mode():
            # As for a block in the worker: without the hooks that count the model's own calls.
            self._parts.append(self._apply(*args))
        self.num_done = min(start + self.part_rows, self.num_rows)

    def result(self) -> Any:
        """Return the module's output, joined from the parts, with the arguments' axes of rows."""
        if self._is_whole:
            return self._parts[0]
        columns = [list(tensors(part)) for part in self._parts]
        merged = iter([torch.cat(column) for column in zip(*columns, strict=True)])
        return map_tensors(self._parts[0], lambda _: self._shaped(next(merged)))

    def _shaped(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(*self._row_shape, *rows.shape[1:])


_NUMBER_BYTES: Final = 4
"""Maximum size of an element of a module's output."""
_NORMS: Final = (RMSNorm, GemmaRMSNorm, torch.nn.LayerNorm)
_GATES: Final = (SiluAndMul, GeluAndMul)
_ELEMENTWISE: Final = (torch.nn.GELU, torch.nn.SiLU, torch.nn.ReLU, torch.nn.Tanh, torch.nn.Identity)


class CallableModules:
    """Calls modules of one model for sandboxed blocks; no block can have values of ``refused`` places.

    ``entry`` is the place where the residual stream begins, if a tap lies there; else empty.
    """

    def __init__(
        self,
        model: WorkerModel,
        dispatcher: TraceDispatcher,
        points: ModelPoints,
        config: VllmConfig,
        limits: EngineLimits,
        adapters: BlockAdapters,
    ) -> None:
        """Build the table of modules; a path received from a process is only looked up in this table."""
        self._envoys = {str(envoy.path): envoy for envoy in model.modules()}
        self._dispatcher = dispatcher
        self.adapters = adapters
        self.entry = model.entry
        of_modules = {f"{path}.{side}" for path in self._envoys for side in ("input", "output")}
        self.refused = frozenset(
            module_path for module_path in of_modules if dispatcher.refusal(module_path) is not None
        )
        self.places = frozenset(of_modules | ({self.entry} if self.entry else set())) - self.refused
        self._max_rows: int = config.scheduler_config.max_num_batched_tokens
        self._max_bytes = limits.sandbox_message_bytes
        blocks = points.layout.blocks
        self._max_width = 2 * max(points.hidden_size, *(block.inner_size for block in blocks))
        layers = f"{model.path}.{points.family.layers}"
        self._mlps = {f"{layers}.{layer}.{block.mlp}" for layer, block in enumerate(blocks) if block.mlp}
        self._hidden_size = points.hidden_size
        weight = next(points.model.parameters())
        self._dtype, self._device = weight.dtype, weight.device

    @property
    def call_bytes(self) -> int:
        return 2 * self._max_rows * self._max_width * _NUMBER_BYTES

    def begin_call(self, path: str, args: Sequence[Any], kwargs: dict[str, Any]) -> ModuleCall:
        """Begin a call; SandboxedError if untrusted blocks cannot call the module, or not so."""
        envoy = self._envoys.get(path)
        if envoy is None:
            raise SandboxedError.uncalled(path, "the model has no such module")
        module = base_module(envoy._module)  # noqa: SLF001 - an envoy of ours
        if kwargs or not args or not all(isinstance(arg, torch.Tensor) for arg in args):
            raise SandboxedError.uncalled(path, "it takes tensors of rows, in order and without names")
        rows = [arg.to(self._device) for arg in args]
        self._check(path, module, rows)
        embeds = isinstance(module, VocabParallelEmbedding) and not rows[0].is_floating_point()
        row_bytes, row_work = self._cost(module, rows[0], embeds=embeds)
        num_axes = rows[0].ndim if embeds else rows[0].ndim - 1
        apply = partial(self._dispatcher.call_module, envoy)
        call = ModuleCall(path, apply, rows, num_axes, rows_at_once(row_work))
        if call.num_rows * row_bytes > self._max_bytes:
            raise SandboxedError.uncalled(
                path,
                f"{call.num_rows:,} rows would give {call.num_rows * row_bytes:,} bytes, and a sandbox takes "
                f"{self._max_bytes:,} at once; call it with {self._max_bytes // row_bytes:,} rows or fewer",
            )
        return call

    def _cost(self, module: torch.nn.Module, argument: torch.Tensor, *, embeds: bool) -> tuple[int, int]:
        """Return the maximum output bytes per row, and the multiplications per row."""
        width = self._hidden_size if embeds else int(argument.shape[-1])
        known: Any = module
        if isinstance(module, VocabParallelEmbedding):
            width = width if embeds else int(known.num_embeddings)
        elif isinstance(module, LinearBase):
            width = max(width, int(known.output_size))
        elif isinstance(module, torch.nn.Linear):
            width = max(width, int(known.out_features))
        work = width if embeds else max(width, sum(map(_multiplications, module.modules())))
        num_outputs = 2 if isinstance(module, RMSNorm | GemmaRMSNorm) else 1  # with the residual
        return width * num_outputs * _NUMBER_BYTES, work

    def _check(self, path: str, module: torch.nn.Module, rows: Sequence[torch.Tensor]) -> None:
        """Raise SandboxedError unless the width, dtype and number of rows are what the kernel trusts."""
        first = rows[0]
        if isinstance(module, VocabParallelEmbedding) and not first.is_floating_point():
            self._check_tokens(path, module, rows)
            return
        width = self._width(path, module)
        max_tensors = 2 if isinstance(module, RMSNorm | GemmaRMSNorm) else 1  # with the residual
        if len(rows) > max_tensors:
            raise SandboxedError.uncalled(
                path, f"it takes {max_tensors} tensors at most here, got {len(rows)}"
            )
        for tensor in rows:
            if tensor.dtype is not self._dtype or tensor.ndim == 0 or (width and tensor.shape[-1] != width):
                raise SandboxedError.uncalled(
                    path,
                    f"it takes {self._dtype} of shape [..., {width or 'any'}], got {tensor.dtype} of "
                    f"{list(tensor.shape)}",
                )
            if tensor.shape != first.shape:
                raise SandboxedError.uncalled(path, "its tensors must be of one shape")
            if tensor.shape[-1] > self._max_width:
                raise SandboxedError.uncalled(
                    path, f"its rows have {self._max_width:,} numbers at most, got {tensor.shape[-1]:,}"
                )
            if tensor.shape[:-1].numel() > self._max_rows:
                raise SandboxedError.uncalled(
                    path, f"it takes {self._max_rows:,} rows at once, as many as a step of the engine has"
                )

    def _check_tokens(self, path: str, module: Any, rows: Sequence[torch.Tensor]) -> None:
        """Raise SandboxedError unless the argument is one tensor of tokens that the vocabulary has."""
        tokens = rows[0]
        vocabulary = int(module.org_vocab_size)
        is_of_numbers = tokens.dtype in {torch.int32, torch.int64} and len(rows) == 1
        if not is_of_numbers or not 0 < tokens.numel() <= self._max_rows:
            raise SandboxedError.uncalled(
                path, f"it embeds 1 to {self._max_rows:,} tokens, of int32 or int64"
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
            raise SandboxedError.uncalled(path, f"tokens are from 0 to {vocabulary - 1}")

    def _width(self, path: str, module: Any) -> int:
        """Return the width of a module's rows, 0 for any; SandboxedError if untrusted code cannot call it."""
        if isinstance(module, VocabParallelEmbedding):
            return int(module.embedding_dim)
        if isinstance(module, LinearBase):
            return int(module.input_size)
        if isinstance(module, _NORMS):
            return weight_width(module) or self._hidden_size
        if isinstance(module, torch.nn.Linear):
            return int(module.in_features)
        if isinstance(module, _ELEMENTWISE):
            return 0
        if path in self._mlps and _is_harmless(module):
            return self._hidden_size
        raise SandboxedError.uncalled(
            path, "modules that compute on rows are: norms, linear layers, MLPs, and the (un)embedding"
        )


def _multiplications(module: torch.nn.Module) -> int:
    """Return the multiplications per row of one module, over all ranks and without its children's."""
    linear: Any = module
    if isinstance(module, LinearBase):
        return int(linear.input_size) * int(linear.output_size)
    if isinstance(module, VocabParallelEmbedding):
        return int(linear.num_embeddings) * int(linear.embedding_dim)
    if isinstance(module, torch.nn.Linear):
        return int(linear.in_features) * int(linear.out_features)
    return 0


def _is_harmless(module: torch.nn.Module) -> bool:
    """Return whether all leaf modules of a module only compute on rows."""
    known = (*_NORMS, *_GATES, *_ELEMENTWISE, LinearBase, torch.nn.Linear)
    return all(isinstance(leaf, known) for leaf in module.modules() if next(leaf.children(), None) is None)
