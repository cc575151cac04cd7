"""Steps with interventions never wait for the device: nothing that they do needs a value on the host.

On a CPU nothing waits, so the calls that would wait on a GPU are counted, around all that interventions do in
a step and without the model. Copies to the host's own memory are what results leave with.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.dictionaries import random_dictionary
from nnsight_engine.plans.answer_parts import AnswerMarkers
from nnsight_engine.plans.step.plan import StepPlan
from nnsight_engine.vllm_backend.steps.worker_state import WorkerState
from tests.e2e.engine_kinds import EngineKind, prepared
from tests.e2e.harness import Ask, Engine, random_vector
from tests.families.checkpoints import HIDDEN_SIZE, write_checkpoint

pytestmark = pytest.mark.e2e

WAITING_CALLS: Final = {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
}
WAITING_OPERATIONS: Final = {
    torch.ops.aten._local_scalar_dense.default,  # noqa: SLF001 - an operator's name
    torch.ops.aten.nonzero.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.masked_select.default,
}
VECTOR: Final = random_vector(0, HIDDEN_SIZE)
STEER: Final = {"op": "steer", "at": "layers.1.output", "vector": VECTOR, "scale": 2.0}
CAPTURE: Final = {"op": "capture", "at": ["layers.*.output"], "name": "c"}
BY_TOKEN: Final = {"where": {"tokens": list(range(0, 300, 2)), "phase": "generated"}}
OF_PART: Final = {"where": {"scope": "reasoning"}}
MARKERS: Final = AnswerMarkers({token: 1 + token % 3 for token in range(0, 300, 9)})
PROBE: Final = {"at": "layers.0.output", "weights": random_vector(3, HIDDEN_SIZE)}
TEST: Final[dict[str, Any]] = {"probe": PROBE, "above": 0.0}
OVER_TIME: Final = TEST | {"over": "window", "of": 4, "reduce": "mean", "hysteresis": 0.5}
DICTIONARY: Final = random_dictionary(1, HIDDEN_SIZE)
REQUESTS: Final[dict[str, list[dict[str, Any]]]] = {
    "plain": [],
    "steered": [STEER],
    "norm_match": [STEER | {"mode": "norm_match"}],
    "held": [
        STEER | {"mode": "clamp", "scale": None, "low": -1.0},
        STEER | {"at": "layers.2.output", "mode": "affine", "scale": None, "gain": 0.5},
    ],
    "out of a subspace": [
        {
            "op": "steer",
            "at": "layers.1.output",
            "vectors": [{"vector": VECTOR}, {"vector": random_vector(2, HIDDEN_SIZE)}],
            "mode": "project_out",
        }
    ],
    "ablated": [{"op": "ablate", "at": "layers.2.output"}],
    "captured": [CAPTURE],
    "reduced": [CAPTURE | {"reduce": "mean"}],
    "logits": [{"op": "capture", "at": ["logits"], "name": "c"}],
    "samples": [{"op": "capture", "at": ["samples"], "name": "c"}],
    "probed": [
        {"op": "probe", "at": "layers.2.output", "weights": random_vector(1, HIDDEN_SIZE), "name": "p"}
    ],
    "lens": [{"op": "logit_lens", "layers": "all", "top_k": 2, "name": "l"}],
    "by token": [STEER | BY_TOKEN, CAPTURE | BY_TOKEN],
    "in a part of the answer": [STEER | OF_PART, CAPTURE | OF_PART],
    "under a condition": [STEER | {"when": TEST}],
    "under conditions over time": [
        STEER | {"when": {"any": [OVER_TIME, {"not": TEST | {"until": "end"}}]}},
        {"op": "flag", "when": OVER_TIME, "name": "f"},
        {"op": "stop", "when": TEST | {"above": 1e9}, "name": "s"},
    ],
    "for the next position": [
        STEER | {"where": {"phase": "generated"}, "when": TEST | {"probe": PROBE | {"at": "layers.2.output"}}}
    ],
    "features": [
        {"op": "features", "dictionary": DICTIONARY, "top_k": 3, "name": "top"},
        {"op": "features", "dictionary": DICTIONARY, "features": [5, 1], "name": "given"},
        {"op": "feature", "dictionary": DICTIONARY, "changes": [{"feature": 7, "mode": "add", "value": 1.0}]},
    ],
    "under a condition on a feature": [STEER | {"when": {"dictionary": DICTIONARY, "feature": 3}}],
    "inside a layer": [{"op": "capture", "at": ["layers.2.mlp.output"], "name": "c"}],
}


class Calls(TorchFunctionMode):
    """Counts calls of methods that would wait."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING_CALLS:
            self._found.append("".join(traceback.format_stack(limit=6)))
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts operators that would wait."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING_OPERATIONS:
            self._found.append("".join(traceback.format_stack(limit=12)))
        return func(*args, **(kwargs or {}))


def counting(method: Callable[..., Any], found: list[str]) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with Calls(found), Operations(found):
            return method(*args, **kwargs)

    return counted


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path: Path = write_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    with prepared(EngineKind("v1", is_async=True)):
        engine = Engine(path, dtype="float32", async_scheduling=True, max_model_len=128, max_num_seqs=16)
        engine.markers = MARKERS
        yield engine
        engine.close()


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the stacks of calls that would wait, of all that follow."""
    stacks: list[str] = []
    for name in ("plan", "on_hidden", "on_logits", "collect", "leave"):
        monkeypatch.setattr(WorkerState, name, counting(getattr(WorkerState, name), stacks))
    monkeypatch.setattr(StepPlan, "run", counting(StepPlan.run, stacks))
    return stacks


@pytest.mark.parametrize("name", REQUESTS)
def test_no_step_waits(engine: Engine, found: list[str], name: str) -> None:
    asks = [Ask([5, 9, 11], REQUESTS[name], 12, {"temperature": 0.0, "ignore_eos": True}) for _ in range(2)]
    for (reply,) in engine.run(asks):
        assert reply.failure is None
        assert len(reply.token_ids) == 12
    assert not found, found[0]


def test_waits_are_found(engine: Engine, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = StepPlan.run

    def waiting(plan: StepPlan, key: Any, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        with Calls(found), Operations(found):
            assert hidden.sum().item() == hidden.sum().item()
        run(plan, key, hidden, residual)

    monkeypatch.setattr(StepPlan, "run", waiting)
    engine.run([Ask([5, 9, 11], [STEER], 4, {"temperature": 0.0})])
    assert found
