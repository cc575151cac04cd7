"""Finds the residual stream of a model of no table, and proves it by running the model.

What a run on a few tokens shows is tested: the stream is changed as a tap changes it, and the model's output
must follow. The runs have no KV cache, so attention and recurrence return zeros.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from unittest import mock

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_pp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.sequence import IntermediateTensors

from nnsight_engine.families.layout import EngineFamily

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

NAME: Final = "structure"
"""Name of the family of a model whose parts were found here."""

_NUM_TOKENS: Final = 8
_SEED: Final = 5
_FIRST_ID: Final = 5
"""Tokens of lower ids are often special."""
_STOP_ID: Final = 1000
_NUM_MROPE_AXES: Final = 3
_SAME: Final = 0.05
"""Bound on the difference of outputs that should be the same, as a share of a change's effect."""


class _UnprovenError(Exception):
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The parts of a model; ``family`` is without blocks if the residual stream was not found."""

    family: EngineFamily
    remarks: tuple[str, ...]


@dataclasses.dataclass(slots=True)
class _Call:
    """One call of a module: copies of those arguments and results that have the stream's shape."""

    module: nn.Module
    inputs: dict[int | str, torch.Tensor]
    outputs: list[torch.Tensor | None]
    is_tuple: bool


class _RecordedRun(NamedTuple):
    """A run of a model: the calls of the blocks at a path, the module that ends the model, its output."""

    layers: str
    calls: list[_Call]
    end: tuple[str, torch.Tensor] | None
    output: torch.Tensor


class Runs(Protocol):
    """Runs a model or one stage of it on the same tokens; ``num_layers`` includes those of other stages."""

    model: nn.Module
    hidden_size: int
    num_layers: int
    is_last: bool

    def output(self) -> torch.Tensor:
        """Run the model and return its hidden states, ``[tokens, hidden]``; of an early stage, their sum."""

    def noise(self, like: torch.Tensor) -> torch.Tensor:
        """Return a change of a stream, the same each time, in its shape, dtype and scale."""

    def is_stream(self, value: object) -> bool: ...


class ModelRuns(Runs):
    def __init__(self, model: nn.Module, config: VllmConfig, device: torch.device) -> None:
        """Choose the tokens and the noise, the same for all runs."""
        self.model = model
        self._config = config
        self.hidden_size: int = config.model_config.get_hidden_size()
        self.num_layers = config.model_config.get_total_num_hidden_layers()
        self.is_last = get_pp_group().is_last_rank
        generator = torch.Generator().manual_seed(_SEED)
        vocab_size = min(config.model_config.get_vocab_size(), _STOP_ID)
        self._ids = torch.randint(_FIRST_ID, vocab_size, (_NUM_TOKENS,), generator=generator).to(device)
        positions = torch.arange(_NUM_TOKENS, device=device)
        self._positions = (
            positions.expand(_NUM_MROPE_AXES, -1) if config.model_config.uses_mrope else positions
        )
        self._noise = torch.randn(_NUM_TOKENS, self.hidden_size, generator=generator).to(device)

    def output(self) -> torch.Tensor:
        """Run the model on the tokens as vLLM does, with noise as what earlier stages would send."""
        model: Any = self.model
        inputs: dict[str, Any] = {"input_ids": self._ids, "positions": self._positions}
        with (
            torch.inference_mode(),
            set_current_vllm_config(self._config),
            set_forward_context(None, self._config, num_tokens=_NUM_TOKENS, skip_compiled=True),
            _mixers_zeroed(model),
        ):
            if self._config.model_config.is_multimodal_model:
                inputs |= {"input_ids": None, "inputs_embeds": model.embed_input_ids(self._ids)}
            if not get_pp_group().is_first_rank:
                dtype = self._config.model_config.dtype
                received = model.make_empty_intermediate_tensors(_NUM_TOKENS, dtype, self._ids.device)
                generator = torch.Generator().manual_seed(_SEED)
                for tensor in received.tensors.values():
                    tensor.copy_(torch.randn(tensor.shape, generator=generator))
                inputs |= {"intermediate_tensors": received}
            returned = model(**inputs)
        if isinstance(returned, IntermediateTensors):
            returned = torch.stack([part for part in returned.tensors.values() if self.is_stream(part)]).sum(
                0
            )
        hidden: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
        return hidden.reshape(-1, hidden.shape[-1]).clone()

    def noise(self, like: torch.Tensor) -> torch.Tensor:
        scale = float(like.float().std()) or 1.0
        return (self._noise * scale).to(like.dtype).view(like.shape)

    def is_stream(self, value: object) -> bool:
        """Return whether a value has the shape of the residual stream."""
        return (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.shape in {(_NUM_TOKENS, self.hidden_size), (1, _NUM_TOKENS, self.hidden_size)}
        )


def found_family(runs: Runs) -> Found:
    """Find a model's blocks, residual stream and final norm by running it; what is unproven is left out."""
    name = type(runs.model).__name__
    nothing = EngineFamily(NAME, (name,), layers="", final_norm="", leaves={}, kernel="")
    try:
        layers, calls, norm, plain = _recorded_run(runs)
    except _UnprovenError as error:
        return Found(nothing, (str(error),))
    blocks = [call.module for call in calls]
    try:
        family = _stream_of(dataclasses.replace(nothing, layers=layers), calls)
        family = _proven(family, runs, blocks, plain)
    except _UnprovenError as error:
        return Found(nothing, (str(error),))
    form = "(hidden, residual)" if family.returns_residual else "one tensor"
    remark = f"the residual stream is {form} between the {len(blocks)} blocks at {layers}"
    try:
        return Found(
            dataclasses.replace(family, final_norm=_norm_of(family, runs, calls[-1], norm)), (remark,)
        )
    except _UnprovenError as error:
        return Found(family, (remark, str(error)))


def _recorded_run(runs: Runs) -> _RecordedRun:
    """Run the model, and find its blocks by their calls; raise _UnprovenError if they are not clear."""
    model = runs.model
    paths = {id(module): path for path, module in model.named_modules()}
    stacks = {path: [*module] for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    blocks = {id(block) for stack in stacks.values() for block in stack}
    calls: list[_Call] = []
    outputs_of_others: list[tuple[str, torch.Tensor]] = []
    inputs_of_open_calls: list[dict[int | str, torch.Tensor]] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        inputs_of_open_calls.append({key: value.clone() for key, value in arguments if runs.is_stream(value)})

    def after(module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        # Copied, since later modules write in place. One of the others is the final norm.
        values = output if isinstance(output, tuple) else (output,)
        copies = [value.clone() if runs.is_stream(value) else None for value in values]
        inputs = inputs_of_open_calls.pop()
        if id(module) in blocks:
            calls.append(_Call(module, inputs, copies, isinstance(output, tuple)))
        elif copies[0] is not None:
            outputs_of_others.append((paths[id(module)], copies[0]))

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after).remove)
        output = runs.output()
    if not torch.equal(output, runs.output()):
        raise _UnprovenError("two runs on the same tokens differ, so that no change can be told")
    in_order = {
        path: stack_calls
        for path, stack in stacks.items()
        if (stack_calls := _called_in_order(stack, calls)) and stack_calls[0].outputs[0] is not None
    }
    if not in_order:
        lists = ", ".join(f"{path} ({len(stack)})" for path, stack in stacks.items()) or "none"
        raise _UnprovenError(
            f"no list of blocks passes a stream [tokens, {runs.hidden_size}] on in order; lists: {lists}"
        )
    path = max(in_order, key=lambda path: (len(stacks[path]) == runs.num_layers, len(in_order[path])))
    around = {"", *(path[:end] for end in range(len(path)) if path[end] == ".")}
    matching_ends = (
        end
        for end in outputs_of_others
        if end[0] not in around and torch.equal(end[1].flatten(0, -2), output)
    )
    return _RecordedRun(path, in_order[path], next(matching_ends, None), output)


def _called_in_order(stack: Sequence[nn.Module], calls: Sequence[_Call]) -> list[_Call]:
    """Return the calls of a list's blocks; empty if they were not called once each, in order."""
    blocks = [block for block in stack if next(block.children(), None) is not None]
    members = {id(block) for block in blocks}
    called = [call for call in calls if id(call.module) in members]
    return called if [call.module for call in called] == blocks else []


def _stream_of(family: EngineFamily, calls: Sequence[_Call]) -> EngineFamily:
    """Return the family with how the stream enters and leaves the blocks, as their calls have shown."""
    first_call = calls[0]
    # A pipeline stage may hold a single block, which then shows its first argument only.
    key = (
        _received(first_call.outputs[0], calls[1], family.layers)
        if len(calls) > 1
        else next(iter(first_call.inputs))
    )
    parameters = list(inspect.signature(type(first_call.module).forward).parameters)[1:]
    name = parameters[key] if isinstance(key, int) and key < len(parameters) else str(key)
    index = key if isinstance(key, int) else 0
    if name in parameters:
        index = parameters.index(name)
    hidden = first_call.outputs[0]
    is_pair = first_call.is_tuple and len(first_call.outputs) > 1 and first_call.outputs[1] is not None
    for call, following in itertools.pairwise(calls):
        _received(call.outputs[0], following, family.layers)
    return dataclasses.replace(
        family,
        hidden_index=index,
        hidden_name=name,
        returns_residual=is_pair,
        returns_none=first_call.is_tuple and not is_pair,
        is_batched=hidden is not None and hidden.ndim == len(("batch", "tokens", "width")),
    )


def _received(output: torch.Tensor | None, following: _Call, layers: str) -> int | str:
    """Return the argument, by position or name, that is the stream; raise _UnprovenError if none is."""
    for key, value in following.inputs.items():
        if output is not None and torch.equal(value, output):
            return key
    raise _UnprovenError(f"a block of {layers} does not receive the stream that the one before it returned")


def _proven(
    family: EngineFamily, runs: Runs, blocks: Sequence[nn.Module], plain: torch.Tensor
) -> EngineFamily:
    """Return the family with the role of the second tensor, if the output follows changes of the stream."""

    def changed(change: Callable[[torch.Tensor, Any], tuple[Any, Any]], block: nn.Module) -> torch.Tensor:
        with _replaced(block, change):
            return runs.output()

    of_each_kind = {type(block): number for number, block in reversed([*enumerate(blocks)])}
    chosen = sorted({*of_each_kind.values(), len(blocks) // 2, len(blocks) - 1})
    ignores_second = set()
    for number in chosen:
        where = f"the output of {family.layers}.{number}"
        block = blocks[number]
        added = changed(lambda hidden, rest: (hidden + runs.noise(hidden), rest), block)
        in_place = changed(lambda hidden, rest: (hidden.add_(runs.noise(hidden)), rest), block)
        effect = float((added - plain).abs().max())
        if not effect:
            raise _UnprovenError(f"a change of {where} does not reach the model's output")
        if not _is_same(added, in_place, effect):
            raise _UnprovenError(f"a change in place of {where} has another effect than a replacement")
        if not family.returns_residual:
            continue
        # A sum stays if one summand gets what the other loses.
        moved = changed(lambda hidden, rest: (hidden + runs.noise(hidden), rest - runs.noise(hidden)), block)
        ignored = changed(lambda hidden, rest: (hidden, rest + runs.noise(hidden)), block)
        is_ignored = _is_same(ignored, plain, effect)
        if not (is_ignored or _is_same(moved, plain, effect)):
            raise _UnprovenError(f"the stream is not the sum of both tensors of {where}")
        ignores_second.add(is_ignored)
    if len(ignores_second) > 1:
        raise _UnprovenError(f"the second tensor that blocks of {family.layers} return is read by some only")
    first_block = blocks[0]
    with _changed_input(first_block, family, runs):
        if _is_same(runs.output(), plain, effect / 1000):
            raise _UnprovenError(
                f"a change of the input of {family.layers}.0 does not reach the model's output"
            )
    if not torch.equal(runs.output(), plain):
        raise _UnprovenError("the model's output does not come back after a change")
    return dataclasses.replace(family, has_unused_residual=ignores_second == {True})


def _norm_of(family: EngineFamily, runs: Runs, last: _Call, end: tuple[str, torch.Tensor] | None) -> str:
    """Return the final norm; raise _UnprovenError if it is no function of the last block's output."""
    if not runs.is_last:
        return ""
    if end is None:
        raise _UnprovenError("no module returns the model's hidden states, so that there is no norm.output")
    path, normed = end
    hidden, *rest = last.outputs
    stream = hidden
    if family.returns_residual and not family.has_unused_residual and hidden is not None:
        stream = hidden + rest[0]  # type: ignore[operator] # a pair
    module = runs.model.get_submodule(path)
    with torch.inference_mode():
        again = type(module).forward(module, stream)
    recomputed = again[0] if isinstance(again, tuple) else again
    if not _is_same(recomputed.reshape(normed.shape), normed, float(normed.abs().max())):
        raise _UnprovenError(f"{path} does more than norm the last block's output, so that there is no lens")
    return path


def _is_same(value: torch.Tensor, other: torch.Tensor, effect: float) -> bool:
    return float((value - other).abs().max()) <= _SAME * effect


@contextlib.contextmanager
def _replaced(block: nn.Module, change: Callable[[torch.Tensor, Any], tuple[Any, Any]]) -> Iterator[None]:
    """Have a block return what ``change`` makes of the two tensors that it returns, or of one and None."""

    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        if not isinstance(output, tuple):
            return change(output, None)[0]
        hidden, rest = change(output[0], output[1] if len(output) > 1 else None)
        return (hidden, rest, *output[2:])[: len(output)]

    handle = block.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _changed_input(block: nn.Module, family: EngineFamily, runs: Runs) -> Iterator[None]:
    """Add noise to the stream that a block receives, in place, as a tap changes it."""

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = family.hidden_of(args, kwargs)
        hidden.add_(runs.noise(hidden))

    handle: RemovableHandle = block.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _mixers_zeroed(model: nn.Module) -> Iterator[None]:
    """Let attention and recurrence return zeros: without a cache they leave uninitialised memory."""
    mixers: list[Any] = [module for module in model.modules() if isinstance(module, AttentionLayerBase)]

    def zeroed(forward: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            returned = forward(*args, **kwargs)
            # Some write into an argument instead.
            is_returned = isinstance(returned, torch.Tensor)
            output = returned if is_returned else parameters.bind(*args, **kwargs).arguments["output"]
            output.zero_()
            return returned

        return run

    with contextlib.ExitStack() as stack:
        for mixer in mixers:
            stack.enter_context(mock.patch.object(mixer, "forward", zeroed(mixer.forward)))
        yield
