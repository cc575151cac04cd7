"""A toy model, requests that run on it in random steps, and what they should give.

The model has no attention between positions, but queries and keys, of which patterns are captured.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.tensors import DTYPES
from nnsight_engine.plans.collect.collector import RequestCollector
from nnsight_engine.plans.collect.outbox import Outbox
from nnsight_engine.plans.collect.results import CollectedResults
from nnsight_engine.plans.records import Failure, Payload
from nnsight_engine.plans.request_plan import LOGITS, AnswerMarkers, CompiledRequest, PlannedSite, RequestPlan
from nnsight_engine.plans.step.active import ActiveRequest
from nnsight_engine.plans.step.builder import StepBuilder
from nnsight_engine.plans.step.context import ByteLedger, StepContext, site_key
from nnsight_engine.plans.step.delivery import StepCollection, step_delivery
from nnsight_engine.plans.step.graph_table import instructions_per_row
from nnsight_engine.plans.step.host_arena import HostArena
from nnsight_engine.plans.step.plan import LogitsRows, Span, StepPlan
from nnsight_engine.plans.step.read_kernels import AttentionForm
from nnsight_engine.plans.step.registrar import Registrar
from nnsight_engine.plans.step.table import Segment
from tests.e2e.fuzz.expected import Twin
from tests.e2e.fuzz.world import World
from tests.fakes.model_specs import tiny_spec
from tests.unit.plans.compiling import tensors_of

WIDTH, LAYERS, VOCABULARY, HEADS, HEAD_DIM = 8, 4, 50, 2, 4
FORM: Final = AttentionForm(scale=0.7, soft_cap=2.0, window=4)
MARKERS: Final = AnswerMarkers({3: 2, 7: 1, 11: 3, 12: 3, 20: 1}, 2, frozenset({5}))
"""Tokens that begin or end the parts of an answer."""
SPEC: Final = tiny_spec(
    num_layers=LAYERS, vocab_size=VOCABULARY, max_model_len=128, max_num_batched_tokens=128
)
NORM: Final = PlannedSite("norm.output")
_LEAVES: Final = frozenset(
    {"embed.output", "input", "attn.output", "mlp.act", "mlp.output", "output", "norm.output", "logits"}
)

Meet = Callable[[str, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Returns the value of a point, given its two summands."""


class ToyModel:
    """A model whose weights are rounded to a dtype.

    Args:
        dtype: That of the weights.
        computes_in: That of the computation.
    """

    def __init__(self, dtype: torch.dtype, computes_in: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> torch.Tensor:
            numbers = torch.randn(shape, generator=generator) / math.sqrt(shape[-2])
            return numbers.to(dtype).to(computes_in)

        self.embedding = drawn(VOCABULARY, WIDTH) * 8
        self.up, self.down = drawn(LAYERS, WIDTH, 2 * WIDTH), drawn(LAYERS, 2 * WIDTH, WIDTH)
        self.value = drawn(LAYERS, WIDTH, WIDTH)
        self.queries, self.keys = drawn(2, LAYERS, WIDTH, HEADS * HEAD_DIM)
        self.head = drawn(WIDTH, VOCABULARY)

    def layer(self, number: int, x: torch.Tensor, meet: Meet) -> torch.Tensor:
        """Return the residual stream behind a layer."""
        x = x + meet(f"layers.{number}.attn.output", torch.sin(x @ self.value[number]), None)
        inner = meet(f"layers.{number}.mlp.act", torch.tanh(x @ self.up[number]), None)
        return meet(
            f"layers.{number}.output", meet(f"layers.{number}.mlp.output", inner @ self.down[number], None), x
        )

    def forward(
        self, x: torch.Tensor, meet: Meet, attend: Callable[[int, torch.Tensor, torch.Tensor], None]
    ) -> torch.Tensor:
        """Return the final norm's output, given embeddings ``[tokens, width]``."""
        x = meet("embed.output", x, None)
        for number in range(LAYERS):
            heads = (x @ one[number] for one in (self.queries, self.keys))
            attend(number, *(rows.view(-1, HEADS, HEAD_DIM) for rows in heads))
            x = self.layer(number, x, meet)
        return meet("norm.output", self.norm(x), None)

    @staticmethod
    def norm(x: torch.Tensor) -> torch.Tensor:
        scale: torch.Tensor = x.norm(dim=-1, keepdim=True) / math.sqrt(WIDTH) + 1e-3
        return x / scale

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        return normed @ self.head


def encode(text: str) -> list[int]:
    """Return the one token that a text such as "t7" stands for."""
    return [int(text.removeprefix("t"))]


class ToyTwin(Twin):
    """What the toy model computes on all positions at once, with operations as the documentation has them."""

    def __init__(self, dtype: torch.dtype, computes_in: torch.dtype) -> None:
        self.model = ToyModel(dtype, computes_in)
        self.dtype = computes_in
        self.num_layers = LAYERS
        self.encode = encode
        self.markers = MARKERS

    def unembed(self, rows: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.logits(self.model.norm(rows))
        return logits

    def _forward(self, ids: list[int], acts: dict[str, list[Any]]) -> torch.Tensor:
        def meet(name: str, value: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
            value = value if residual is None else value + residual
            for act in acts.get(name, ()):
                value = act.on(value)
            return value

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor) -> None:
            for act in acts.get(f"layers.{layer}.attn.pattern", ()):
                act.read(patterns(queries, keys))

        normed = self.model.forward(self.model.embedding[ids], meet, attend)
        return meet("logits", self.model.logits(normed), None).float()


def patterns(queries: torch.Tensor, keys: torch.Tensor, form: AttentionForm = FORM) -> torch.Tensor:
    """Return attention patterns, ``[tokens, heads, tokens]``."""
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->qhk", queries, keys) * form.scale
    if form.soft_cap:
        scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
    distance = torch.arange(len(queries))[:, None, None] - torch.arange(len(keys))
    hidden = (distance < 0) | (distance >= (form.window or len(keys)))
    return scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)


def toy_world(twin: Twin) -> World:
    """Return what random requests are made of."""
    leaves = {leaf.name: leaf.width for leaf in SPEC.leaves if leaf.name in _LEAVES}
    ids = list(range(1, VOCABULARY))
    world = World(LAYERS, leaves, {}, ids, {token: f"t{token}" for token in ids[:20]}, 24, 16, MARKERS)
    reads = [{"op": "capture", "at": world.at(leaf, "*")} for leaf in leaves]
    seen = twin.run(ids, len(ids), reads).seen
    norms = {
        leaf: max(float(rows.norm(dim=-1).mean()) for rows in seen[index].rows.values())
        for index, leaf in enumerate(leaves)
    }
    return dataclasses.replace(world, norms=norms)


WORLD: Final = toy_world(ToyTwin(torch.float32, torch.float64))


@dataclasses.dataclass(slots=True)
class Life:
    """A request on the engine.

    Attributes:
        tokens: Those of its prompt and of its answer so far.
        prompt_len: Length of its prompt.
        max_tokens: Tokens of its answer.
        compiled: Its operations; None without any.
        is_whole: Whether its prompt is computed in one step.
        arrives: The step in which it may begin.
        done: Positions that have been computed.
        active: Its operations on the worker.
        payloads: What left with its outputs before the last.
    """

    tokens: list[int]
    prompt_len: int
    max_tokens: int
    compiled: CompiledRequest | None = None
    is_whole: bool = False
    arrives: int = 0
    done: int = 0
    active: ActiveRequest | None = None
    payloads: list[Payload] = dataclasses.field(default_factory=list)

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def is_over(self) -> bool:
        return len(self.answer) == self.max_tokens


class StepEngine:
    """Plans steps of a model, delivers what they have read, and collects it.

    Args:
        spec: The model's description, also its dtype.
        max_bytes: Captured bytes of a request.
        has_arena: Whether values are copied on their way.
    """

    def __init__(self, spec: ModelSpec, *, max_bytes: int = 1 << 30, has_arena: bool = False) -> None:
        device = torch.device("cpu")
        self.spec = spec
        self.ledger = ByteLedger(max_request_bytes=max_bytes, max_engine_bytes=1 << 30)
        context = StepContext(spec, DTYPES[spec.dtype], device, self.ledger, lambda _layer: FORM)
        self.registrar = Registrar(context)
        self.builder = StepBuilder(context)
        self.outbox = Outbox()
        self.collection = StepCollection(self.lens_logits, HostArena(device) if has_arena else None)
        self.failures: dict[str, Failure] = {}

    def lens_logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows of the residual stream."""
        return rows

    def admit(self, name: str, compiled: CompiledRequest, *, stops_outside: bool = False) -> ActiveRequest:
        """Register a request, as it comes over the wire."""
        plan = RequestPlan.decode(compiled.plan.encode())
        self.outbox.open(name, plan, stops_outside=stops_outside)
        return self.registrar.register(name, plan, tensors_of(compiled))

    def deliver(self, plan: StepPlan, sampled: list[list[int]], order: dict[str, int]) -> None:
        """End a step that has run."""
        plan.fail_unreached()
        self.collection.collect(plan)
        results = step_delivery(plan).results(sampled, order)
        self.failures |= results.failures
        self.outbox.absorb(results)
        self.builder.give_back(plan)

    def collector(
        self, compiled: CompiledRequest, prompt: Sequence[int], names: Sequence[str] = ()
    ) -> RequestCollector:
        """Return what collects the results of a request with operations of these names."""
        names = names or [str(op.kind) for op in compiled.plan.ops]
        return RequestCollector(compiled.plan, self.spec, prompt_token_ids=prompt, op_names=names)

    def take(self, name: str, *, final: bool) -> list[Payload]:
        """Return what leaves with an output of a request, as it comes over the wire."""
        payload = self.outbox.take_payload(name, final=final)
        return [] if payload is None else [Payload.decode(payload.encode())]

    def results(
        self, name: str, collector: RequestCollector, answer: Sequence[int], earlier: Sequence[Payload] = ()
    ) -> CollectedResults:
        """Return the results of a request that has its answer, of which some have left earlier."""
        assert name not in self.failures, self.failures[name]
        for payload in [*earlier, *self.take(name, final=True)]:
            collector.add(payload)
        return collector.take_final(answer)


class ToyEngine(StepEngine):
    """Runs requests on the toy model in random chunks, preempts them, and collects their results.

    Args:
        rng: Draws the steps.
        dtype: The model's.
    """

    def __init__(self, rng: random.Random, dtype: torch.dtype = torch.float32) -> None:
        self.model = ToyModel(dtype, dtype)
        spec = dataclasses.replace(SPEC, dtype=str(dtype).removeprefix("torch."))
        super().__init__(spec, has_arena=rng.random() < 0.5)
        self.lives: dict[str, Life] = {}
        self._rng = rng
        self._is_regular = rng.random() < 0.5
        self._is_late = rng.random() < 0.5
        self._taps = range(spec.num_layers + 1)
        self.table = self.builder.graph_table(self._taps, len(self._taps), 64)
        self.num_in_graph = 0

    def lens_logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self.model.logits(self.model.norm(rows))

    def run(self, lives: dict[str, Life]) -> None:
        """Run requests until all have their answers."""
        self.lives |= lives
        for name, life in lives.items():
            if life.compiled is not None:
                # Where stop strings are looked for elsewhere, each output may be the last.
                stops_outside = self._rng.random() < 0.3
                life.active = self.admit(name, life.compiled, stops_outside=stops_outside)
        number = 0
        while not all(life.is_over for life in lives.values()):
            batch = [
                (name, *span)
                for name, life in lives.items()
                if life.arrives <= number and not life.is_over and (span := self._span(life)) is not None
            ]
            number += 1
            if batch:
                self._step(batch)

    def _span(self, life: Life) -> tuple[int, int] | None:
        """Return the positions of a request that the next step computes, or None."""
        rng = self._rng
        if not self._is_regular and rng.random() < 0.1:
            return None
        if life.done and rng.random() < 0.03:
            life.done = 0  # preempted
        left = len(life.tokens) - life.done
        is_split = rng.random() < 0.5 and not (life.is_whole and life.done < life.prompt_len)
        return life.done, life.done + (rng.randint(1, left) if is_split else left)

    def _step(self, batch: list[tuple[str, int, int]]) -> None:
        tokens = torch.tensor([t for name, start, stop in batch for t in self.lives[name].tokens[start:stop]])
        spans, ends, row = list[Span](), list[int](), 0
        for index, (name, start, stop) in enumerate(batch):
            life = self.lives[name]
            if life.active is not None:
                # The host may know the prompt's tokens only, and the device all of the step.
                known = life.tokens[: life.prompt_len if self._is_late else stop]
                ids = np.asarray(known, np.int32)
                spans.append(Span(life.active, row, stop - start, start, ids, tokens.int(), 0, index))
            row += stop - start
            ends.append(row - 1)
        sampled = self._computed(batch, tokens, spans, np.asarray(ends))
        for (name, _, stop), token in zip(batch, sampled, strict=True):
            life = self.lives[name]
            life.done = stop
            if token:
                life.tokens += token
            if token and life.active is not None and not life.is_over:
                life.payloads += self.take(name, final=False)

    def _computed(
        self, batch: list[tuple[str, int, int]], tokens: torch.Tensor, spans: list[Span], ends: Any
    ) -> list[list[int]]:
        """Run the model, and return the tokens that are sampled."""
        plan = self.builder.plan(spans)
        in_graph = self._fits(plan, spans)

        def meet(name: str, value: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
            parts = name.split(".", 2)
            site = PlannedSite(parts[2], int(parts[1])) if parts[0] == "layers" else PlannedSite(name)
            if self._rng.random() < 0.5:  # a part of a larger tensor
                value = torch.stack([value, value], dim=-1)[..., 0]
            key = site_key(site)
            if in_graph and key != NORM:
                if isinstance(key, int):
                    self.table.run(key, value, residual)
            else:
                plan.run(key, value, residual)
            return value if residual is None else value + residual

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor) -> None:
            plan.run(PlannedSite("attn.pattern", layer), queries, keys)

        for _ in range(2 if self._rng.random() < 0.2 else 1):  # vLLM may have to run a step again
            plan.ran.clear()
            if in_graph:
                self.table.serve(plan)
                self.num_in_graph += 1
            rows = self.model.embedding[tokens]
            hidden = self.model.forward(rows, meet, attend)
            logits = self.model.logits(hidden[ends])
            if len(plan.logits_rows):
                origin = LogitsRows.of(plan.logits_rows, ends, torch.device("cpu"))
                wanted = origin.gather(logits, hidden, self.model.logits)
                plan.run(LOGITS, wanted, None)
                origin.put_back(wanted, logits)
        sampled = [
            [int(row.argmax())] if stop == len(self.lives[name].tokens) else []
            for (name, _, stop), row in zip(batch, logits, strict=True)
        ]
        self.deliver(plan, sampled, {name: index for index, (name, *_) in enumerate(batch)})
        return sampled

    def _fits(self, plan: StepPlan, spans: list[Span]) -> bool:
        """Return whether a step could be a full graph, see ``StepGraphs``."""
        if not spans or any(span.num_rows > 1 or span.start < span.request.plan.prompt_len for span in spans):
            return False
        counts = [instructions_per_row(span.request, self._taps, has_drafts=False) for span in spans]
        known = [count for count in counts if count is not None]
        own = [group for key in plan.taps() for group in plan.groups[key]]
        programs = [(one.programs.bounds, one) for one in own if isinstance(one, Segment)]
        made = sum(bounds[one.stop] - bounds[one.first] for bounds, one in programs)
        assert len(known) < len(counts) or made <= sum(known), "more instructions than were counted"
        return len(known) == len(counts)

    def collected(self, name: str, operations: Sequence[dict[str, Any]]) -> CollectedResults:
        """Return the results of a request that has run, and release what it holds."""
        life = self.lives.pop(name)
        assert life.compiled is not None
        assert life.active is not None
        names = [op["op"] for op in operations]
        collector = self.collector(life.compiled, life.tokens[: life.prompt_len], names)
        self.registrar.forget(life.active)
        self.ledger.release(name)
        return self.results(name, collector, life.answer, life.payloads)

    def held(self) -> dict[str, int]:
        """Return what the engine holds for requests."""
        return {
            "bytes": self.ledger.total_bytes,
            "slots": len(self.registrar.slots),
            "vectors": len(self.registrar.bank),
            "dictionaries": self.registrar.dictionaries.num_used,
        }
