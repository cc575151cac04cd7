"""An engine whose model is cut into pieces for CUDA graphs, beside one that is neither cut nor compiled.

The same requests run on both, on ``GraphedCpuPlatform``; drafts of a kind are for the engine that is cut.
Reported are each request's tokens, the tiers of its steps, the modes and sizes chosen for them, and how far
what it captured is from the other engine's.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, Final

import torch
from vllm.compilation.counter import compilation_counter

from nnsight_engine import save
from nnsight_engine.plans.collect.results import CollectedCapture
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.engine_kinds import EngineKind
from tests.e2e.graphed_platform import CAPTURE_SIZES, Piece, graphed_engines
from tests.e2e.harness import Ask, Engine, Reply, random_vector
from tests.e2e.traces import HeldTracer, run_together, traced_engine
from tests.families.checkpoints import HIDDEN_SIZE, write_checkpoint

PROMPT: Final = [11, 7, 23, 5, 42]
NUM_TOKENS: Final = 4
GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
STEER: Final = {"op": "steer", "at": "layers.1.output", "vector": random_vector(0, HIDDEN_SIZE), "scale": 4.0}
OPERATIONS: Final[dict[str, list[dict[str, Any]]]] = {
    "plain": [],
    "steered": [STEER],
    "captured": [STEER, {"op": "capture", "at": ["embed.output", "layers.*.output"], "name": "kept"}],
    "inside": [STEER, {"op": "capture", "at": ["layers.2.mlp.output"], "name": "kept"}],
}


def runner_of(model: VLLM) -> Any:
    return model.engine.llm_engine.model_executor.driver_worker.worker.model_runner


class Steps:
    """Notes how each step is run."""

    def __init__(self, model: VLLM) -> None:
        self._chosen: list[tuple[str, int]] = []
        self._runner = runner_of(model)
        self._before = Counter(self._runner.handler.counts.steps)
        prepare = self._runner.prepare_inputs

        def noting(scheduled: Any, state: Any, batch: Any, *args: Any) -> Any:
            self._chosen.append((batch.cg_mode.name, batch.num_tokens))
            return prepare(scheduled, state, batch, *args)

        self._runner.prepare_inputs = noting

    def take(self) -> dict[str, Any]:
        chosen, self._chosen = self._chosen, []
        after = Counter(self._runner.handler.counts.steps)
        before, self._before = self._before, after
        return {"steps": chosen, "tiers": dict(after - before)}


def at_taps(model: VLLM) -> Any:
    """Read and write layers in every step."""
    with model.trace(PROMPT, tracer_cls=HeldTracer, **GREEDY) as tracer:
        rows = save([])
        for _ in tracer.iter[:]:
            rows.append(model.layers[0].output)
            model.layers[1].output[:, :10] *= 3
            model.layers[2].output = model.layers[2].output * 1.5
            rows.append(model.layers[3].output)
            rows.append(model.logits.output)
    return tracer


def going_on_inside(model: VLLM) -> Any:
    """Write a layer, and then read inside the next."""
    with model.trace(PROMPT, tracer_cls=HeldTracer, **GREEDY) as tracer:
        rows = save([])
        for _ in tracer.iter[:]:
            model.layers[0].output[:] *= 2
            rows.append(model.layers[1].mlp.output)
            rows.append(model.layers[3].output)
    return tracer


def kept(reply: Reply) -> list[torch.Tensor]:
    """Return what a request captured, point by point."""
    result = reply.result("kept")
    assert isinstance(result, CollectedCapture)
    return [reply.tensor("kept", point) for point in result.points]


def observe(model: VLLM) -> tuple[dict[str, dict[str, Any]], dict[str, list[torch.Tensor]]]:
    """Run every request alone and three together; returns what came of them, and what they captured."""
    steps = Steps(model)
    engine = Engine.around(model.engine)
    report: dict[str, dict[str, Any]] = {}
    captured: dict[str, list[torch.Tensor]] = {}
    for name, operations in OPERATIONS.items():
        reply = engine.ask(PROMPT, operations, max_tokens=NUM_TOKENS)
        assert reply.failure is None
        report[name] = {"tokens": reply.token_ids, **steps.take()}
        if any(operation["op"] == "capture" for operation in operations):
            captured[name] = kept(reply)
    for block in (at_taps, going_on_inside):
        ran = run_together(model, [block(model).sent])
        name, outcome = block.__name__, ran.outcomes[0]
        assert outcome.error is None
        report[name] = {"tokens": ran.tokens("trace-0"), **steps.take()}
        captured[name] = outcome.saves["rows"]
    together = [
        Ask(PROMPT, operations, max_tokens=NUM_TOKENS) for operations in list(OPERATIONS.values())[:3]
    ]
    replies = [reply for (reply,) in engine.run(together)]
    report["together"] = {"tokens": [reply.token_ids for reply in replies], **steps.take()}
    captured["together"] = kept(replies[2])
    assert not any(engine.held().values())
    return report, captured


def check(name: str, folder: Path) -> dict[str, Any]:
    """Run both engines, the one that is cut of the kind of this name."""
    kind = EngineKind.named(name)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    checkpoint = write_checkpoint("llama", folder / "llama")
    options: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8}
    with traced_engine(checkpoint, **options) as model:
        eager, expected = observe(model)
    graphs = {"cudagraph_capture_sizes": list(CAPTURE_SIZES)}
    options |= kind.options(checkpoint)
    cut_engine = traced_engine(checkpoint, enforce_eager=False, compilation_config=graphs, **options)
    with graphed_engines(), cut_engine as model:
        cut, captured = observe(model)
        splitting_ops = model.engine.llm_engine.vllm_config.compilation_config.splitting_ops
    for name, values in captured.items():
        pairs = zip(values, expected[name], strict=True)
        cut[name]["off"] = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    return {
        "eager": eager,
        "cut": cut,
        "splitting_ops": splitting_ops,
        "num_pieces": Piece.num_made,
        "num_with_cuts": compilation_counter.num_piecewise_graphs_seen,
        "num_replayed": Piece.num_replayed,
    }
