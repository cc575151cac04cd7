"""A model that a test plays to real sandbox processes, and the steps of a worker over it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, cast

import torch

from api_schemas.operations import Trace
from nnsight_engine.sandbox.forkserver import ForkServer
from nnsight_engine.serialization import decode
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.trace_code import encoded_code
from nnsight_engine.vllm_backend.traces.block_adapters import BlockAdapters
from nnsight_engine.vllm_backend.traces.context import TraceEntry
from nnsight_engine.vllm_backend.traces.messages import StepFacts
from nnsight_engine.vllm_backend.traces.model import Names
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.sandboxed.module_calls import ModuleCall
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces

WIDTH: Final = 8
LAYERS: Final = 4
VOCABULARY: Final = 16
HEAD: Final = "model.lm_head"
"""The path of the module that blocks can call."""
POINTS: Final[Any] = SimpleNamespace(
    tensor_parallel_size=2, local_layers=(), layers=(), model=torch.nn.Linear(1, 1)
)
"""What workers know of the model's points, where no block asks for one."""
REFUSED: Final = "model.model.layers.3.mlp.output"
"""A place of which it is not known how the parts of several ranks make a whole."""
LIMITS: Final = EngineLimits(sandbox_bytes=2**28, sandbox_step_s=2.0)

PROMPT: Final = 3
NEIGHBOUR: Final = 2
"""Rows of another tenant in each step."""
STEPS: Final = 3

CODE: Final = """
import time
def busy():
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        pass
busy()
seen = [].save()
for step in tracer.iter[:3]:
    busy()
    first = model.layers[0].output.sum().item()
    busy()
    model.layers[1].output = model.lm_head(model.layers[1].output)
    busy()
    model.layers[2].output[:] *= 3
    busy()
    last = model.layers[3].output[-1].sum().item()
    model.logits.output[:, 5] = 7
    busy()
    token = model.samples.output.item()
    model.samples.output[:] = token + 1
    busy()
    seen.append((step, first, last, token))
busy()
"""
"""A block that reads, writes and calls a module, and computes for ``SECONDS`` between these."""


def code_lasting(seconds: float) -> str:
    """Return ``CODE`` with the seconds between its accesses."""
    return CODE.replace("SECONDS", str(seconds))


def entry_of(code: str, key: str = "key") -> TraceEntry:
    """Return the entry of a sandboxed request."""
    data = encoded_code(Trace(op="trace", code=code), "test")
    return TraceEntry(key, 0, 1, data, [{}], sandbox_of="tenant")


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = torch.nn.Identity()
        self.mlp = torch.nn.Identity()


class _Body(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Identity()
        self.layers = torch.nn.ModuleList(_Layer() for _ in range(LAYERS))
        self.norm = torch.nn.Identity()


class Outline(torch.nn.Module):
    """What the process knows of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _Body()
        self.lm_head = torch.nn.Identity()


class Served:
    """The places whose values a process can have, and the one module that it can call, on few rows."""

    call_bytes = 2**26

    def __init__(self, traces: WorkerTraces) -> None:
        names = [f"model.model.layers.{layer}" for layer in range(LAYERS)]
        names += [f"{name}.mlp" for name in names] + ["model.logits", "model.samples", HEAD]
        self.places = frozenset(f"{name}.{side}" for name in names for side in ("input", "output"))
        self.adapters = BlockAdapters()
        head = cast("PlayedModel", traces.model).head
        self._apply = partial(traces.dispatcher.call_module, head)

    def begin_call(self, path: str, args: Any, kwargs: Any) -> ModuleCall:
        assert (path, kwargs) == (HEAD, {})
        return ModuleCall(path, self._apply, args, args[0].ndim - 1, 1)


def double(rows: torch.Tensor) -> torch.Tensor:
    return 2 * rows


class PlayedModel:
    """The tree of envoys, of which blocks in a process need a path, and callers of modules one module."""

    path = "model"
    device = torch.device("cpu")
    _sources = ()

    def __init__(self) -> None:
        self.head: Any = SimpleNamespace(path=HEAD, _module=None, _apply_to_values=double)

    def token_places(self) -> dict[str, int]:
        return {"model.samples.output": VOCABULARY}

    def own_modules(self) -> list[Any]:
        return []

    def modules(self) -> list[Any]:
        return []

    def get(self, path: str) -> Any:
        assert path == HEAD
        return self.head

    @contextlib.contextmanager
    def observed_by(self, dispatcher: Any) -> Iterator[None]:
        dispatcher.listen()
        yield
        dispatcher.pause()


class Worker(WorkerTraces):
    """The only worker."""

    def __init__(self, server: ForkServer, **limits: Any) -> None:
        own = dataclasses.replace(LIMITS, **{"sandbox_wait_s": 5.0, **limits})
        super().__init__(POINTS, cast("Any", None), own)
        self.sandboxes.open(server, cast("Any", Served(self)), own.sandbox_message_bytes)

    def _new_model(self, names: Names) -> Any:
        return PlayedModel()

    def end_parked(self) -> bool:
        """End the process that waits for the tenant's next trace; return whether there was one."""
        parked = self.sandboxes._parked.take_process("tenant")
        if parked is not None:
            parked.end()
        return parked is not None


@dataclasses.dataclass
class Played:
    """What the worker saw of a request.

    Attributes:
        block: What came of its block.
        states: What the model ended each step with: the values of the layers, the logits and the token.
        neighbours: The same of the rows of the other tenant.
        undone: The steps that went on without the request.
    """

    block: dict[str, Any] | None = None
    states: list[Any] = dataclasses.field(default_factory=list)
    neighbours: list[Any] = dataclasses.field(default_factory=list)
    undone: list[list[str]] = dataclasses.field(default_factory=list)

    @property
    def saves(self) -> Any:
        """What the block saved."""
        assert self.block is not None
        assert self.block["error"] is None, self.block["error"]["message"]
        return self.block["saves"]


def play(traces: WorkerTraces, code: str, key: str = "key") -> Played:
    """Play the runner to one request until it has its tokens or its trace has ended."""
    played, done, step = Played(), 0, 0
    facts = StepFacts([("own", entry_of(code, key).to_plain())], (), {"own"})
    while step < STEPS:
        num_rows = PROMPT if not step else 1
        # Where its rows are may be another place each time.
        shift = NEIGHBOUR if len(played.states + played.undone) % 2 else 0
        traces.before(facts)
        traces.begin_step(facts)
        facts = StepFacts()
        state, neighbour = _step(traces, done, num_rows, shift)
        undone = list(traces.undone)
        ended = traces.end_step()
        traces.dispatcher.interleaving = False
        if ended:
            break
        if undone:
            played.undone.append(undone)
            assert len(played.undone) < 300
            traces.begin_step(StepFacts())
            traces.wait_for_any(0.05)
            traces.end_step()
            continue
        played.states.append(state)
        played.neighbours.append(neighbour)
        done, step = done + num_rows, step + 1
    traces.begin_step(StepFacts(finished={"own"}))
    played.block = block_of(traces, key)
    return played


def _step(traces: WorkerTraces, done: int, num_rows: int, shift: int) -> tuple[list[Any], list[Any]]:
    total, index = num_rows + NEIGHBOUR, int(shift > 0)
    own = slice(shift, shift + num_rows)
    others = [row for row in range(total) if not own.start <= row < own.stop]
    traces.step([TraceSpan("own", index, shift, num_rows, done, complete=True)], total)
    hidden = torch.zeros(total, WIDTH)
    hidden[own] = torch.arange(done, done + num_rows).float()[:, None]
    traces.dispatcher.listen()
    layers = []
    for layer in range(LAYERS):
        hidden = layer_of_one(traces, layer, hidden)
        layers.append(hidden)
    traces.dispatcher.pause()
    logits = torch.zeros(2, VOCABULARY)
    logits[index] = hidden[own][-1, 0]
    logits = traces.on_logits(logits) if traces.in_step else logits
    samples = torch.tensor([[3], [3]])
    samples = traces.on_samples(samples) if traces.in_step else samples
    rows = [*(layer[own] for layer in layers), logits[index], samples[index]]
    beside = [*(layer[others] for layer in layers), logits[1 - index], samples[1 - index]]
    return [one.tolist() for one in rows], [one.tolist() for one in beside]


def layer_of_one(traces: WorkerTraces, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    """Return the hidden states behind a layer of the only worker."""
    value = (hidden + 1, torch.zeros_like(hidden))
    first, second = traces.dispatcher.provide(f"model.model.layers.{layer}.output", value)
    whole: torch.Tensor = first + second
    return whole


def block_of(traces: WorkerTraces, key: str = "key") -> dict[str, Any] | None:
    """Return the outcome of the block."""
    while not traces.has_collected(key, {"0/0": {}}, 0.05):
        pass
    pieces = traces.collect(key, {"0/0": {}}).pieces
    found: dict[str, Any] | None = decode(b"".join(pieces))["blocks"][0] if pieces else None
    return found
