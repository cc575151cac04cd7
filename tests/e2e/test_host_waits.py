"""Steps with interventions never wait for the device: nothing that they do needs a value on the host.

On a CPU nothing waits, so the calls that would wait on a GPU are counted, around all that interventions do in
a step and without the model. Copies to the host's own memory are what results leave with. Delivery, which
may wait, is not counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch

from api_schemas.conditions import NamedDetector
from api_schemas.detectors import DetectorUsed
from benchmarks.dictionaries import random_dictionary
from benchmarks.host_waits import finding_waits
from nnsight_engine.core.detector import Detector, DetectorPart, Form
from nnsight_engine.plans.request_plan import AnswerMarkers
from nnsight_engine.plans.step import delivery, host_arena
from nnsight_engine.plans.step.active import ActiveRequest
from nnsight_engine.plans.step.builder import StepBuilder
from nnsight_engine.plans.step.delivery import StepCollection
from nnsight_engine.plans.step.plan import StepPlan
from nnsight_engine.plans.step.registrar import Registrar
from nnsight_engine.plans.step.table import Segment
from nnsight_engine.vllm_backend.model_points import ModelPoints
from nnsight_engine.vllm_backend.steps.handler import StepHandler
from nnsight_engine.vllm_backend.steps.tokens import KnownIds
from nnsight_engine.vllm_backend.steps.worker_state import Step, WorkerState
from tests.e2e.engine_kinds import DEFAULT, kind_of_process
from tests.e2e.harness import Ask, Engine, random_vector
from tests.families.checkpoints import HIDDEN_SIZE, write_checkpoint

pytestmark = pytest.mark.e2e

VECTOR: Final = random_vector(0, HIDDEN_SIZE)
STEER: Final = {"op": "steer", "at": "layers.1.output", "vector": VECTOR, "scale": 2.0}
CAPTURE: Final = {"op": "capture", "at": ["layers.*.output"], "name": "c"}
BY_TOKEN: Final = {"where": {"tokens": list(range(0, 300, 2)), "phase": "generated"}}
OF_PART: Final = {"where": {"scope": "reasoning"}}
MARKERS: Final = AnswerMarkers({token: 1 + token % 3 for token in range(0, 300, 9)})
PROBE: Final = {"at": "layers.0.output", "weights": random_vector(3, HIDDEN_SIZE)}
TEST: Final[dict[str, Any]] = {"probe": PROBE, "above": 0.0}
OVER_TIME: Final = TEST | {"over": "window", "of": 4, "reduce": "mean", "hysteresis": 0.5}
DETECTOR: Final = NamedDetector.of(
    DetectorUsed(name="d", version=1, id="d"),
    Detector(
        (
            DetectorPart("layers.0.output", Form.LINEAR, {"weights": np.asarray(VECTOR, np.float32)}),
            DetectorPart(
                "layers.2.output",
                Form.DISTANCE,
                dict.fromkeys(("mean", "scale"), np.asarray(VECTOR, np.float32)),
            ),
        ),
    ),
)
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
    "replaced": [STEER | {"mode": "replace"}],
    "ablated units": [{"op": "ablate", "at": "layers.2.output", "units": [1, 5]}],
    "ablated": [{"op": "ablate", "at": "layers.2.output"}],
    "ablated by the mean": [{"op": "ablate", "at": "layers.2.output", "method": "mean"}],
    "patched": [
        {"op": "patch", "at": "layers.1.output", "values": [VECTOR] * 2, "where": {"positions": [0, 2]}}
    ],
    "captured": [CAPTURE],
    "reduced": [CAPTURE | {"reduce": "mean"}],
    "logits": [{"op": "capture", "at": ["logits"], "name": "c"}],
    "samples": [{"op": "capture", "at": ["samples"], "name": "c"}],
    "probed": [
        {"op": "probe", "at": "layers.2.output", "weights": random_vector(1, HIDDEN_SIZE), "name": "p"}
    ],
    "detected": [{"op": "detect", "detector": DETECTOR, "name": "d"}],
    "patterns": [
        {"op": "capture", "at": "layers.*.attn.pattern", "name": "all"},
        {
            "op": "capture",
            "at": "layers.1.attn.pattern",
            "reduce": "last",
            "dtype": "float32",
            "name": "last",
        },
    ],
    "written inside a layer": [
        STEER | {"at": "layers.2.mlp.output"},
        STEER | {"at": "layers.1.attn.q", "vector": [1.0] * 128},
    ],
    "steered logits": [{"op": "ablate", "at": "logits", "units": [3, 4]}],
    "captured in a narrower dtype": [CAPTURE | {"dtype": "float16"}],
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


HALF: Final = (
    *("norm_match", "held", "out of a subspace", "features", "captured", "by token"),
    *("under conditions over time", "under a condition on a feature"),
)
"""Requests whose numbers are narrowed to float16, or have masks and gates over that."""
DRAFTED: Final = (
    *("steered", "norm_match", "captured", "reduced", "logits", "samples", "probed", "lens", "by token"),
    *("detected", "patterns", "under a condition", "under conditions over time", "features"),
)
"""Requests that take drafts, and some that take none."""


class Served(NamedTuple):
    """A model and the requests that are sent to it."""

    family: str
    dtype: str
    requests: tuple[str, ...]
    is_drafted: bool = False


SERVED: Final = {
    "float32": Served("llama", "float32", tuple(REQUESTS)),
    "float16": Served("llama", "float16", HALF),
    "drafts": Served("llama", "float32", DRAFTED, is_drafted=True),
    "ALiBi": Served("bloom", "float32", ("patterns",)),
}


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Serve by default, or as the process is meant to."""
    served = SERVED[request.param]
    path: Path = write_checkpoint(served.family, tmp_path_factory.mktemp(served.family))
    kind = kind_of_process() or DEFAULT
    if served.is_drafted:
        kind = dataclasses.replace(kind, speculation="self_draft")
    options = {"max_model_len": 128, "max_num_seqs": 16} | kind.options(path)
    with Engine(path, dtype=served.dtype, **options) as engine:
        engine.markers = MARKERS
        yield engine


PHASES: Final[dict[type, tuple[str, ...]]] = {
    StepHandler: ("begin_step", "on_logits", "leave"),
    WorkerState: (
        *("begin_step", "plan", "on_hidden", "on_logits", "collect", "leave"),
        *("results_of_stage", "add_results"),
    ),
    StepPlan: ("run",),
    KnownIds: ("begin_step",),
    Step: ("__init__",),
}


class Counter:
    """Finds calls that would wait, with their stacks, in all phases of steps."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._is_counting = False

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        if self._is_counting:
            yield
            return
        self._is_counting = True
        try:
            with finding_waits(self.found.append):
                yield
        finally:
            self._is_counting = False

    def counted(self, phase: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(phase)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.counting():
                return phase(*args, **kwargs)

        return run

    def entered(self, phase: Callable[..., Any]) -> Callable[..., Any]:
        """Count in a block that a context manager encloses: those of hooks."""

        @contextlib.contextmanager
        def enter(*args: Any, **kwargs: Any) -> Iterator[None]:
            with self.counting(), phase(*args, **kwargs):
                yield

        return enter


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the calls that would wait, of all that follow."""
    counter = Counter()
    for owner, names in PHASES.items():
        for name in names:
            monkeypatch.setattr(owner, name, counter.counted(getattr(owner, name)))
    monkeypatch.setattr(StepPlan, "containing", counter.entered(StepPlan.containing))
    return counter.found


def asked(name: str, num_tokens: int = 12) -> Ask:
    return Ask([5, 9, 11], REQUESTS[name], num_tokens, {"temperature": 0.0, "ignore_eos": True})


# The scope is the module, and a case has a value of its own: otherwise each test would start an engine.
@pytest.mark.parametrize(
    ("engine", "case"),
    [(key, (key, name)) for key, served in SERVED.items() for name in served.requests],
    indirect=["engine"],
    scope="module",
    ids=str,
)
def test_no_step_waits(engine: Engine, found: list[str], case: tuple[str, str]) -> None:
    _, name = case
    for (reply,) in engine.run([asked(name), asked(name)]):
        assert reply.failure is None
        assert len(reply.token_ids) == 12
    assert not found, found[0]


def indexed(x: torch.Tensor, index: Any) -> None:
    x.clone()[index] = x[index] + 1


WAITS: Final[dict[str, Callable[[torch.Tensor], object]]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "cpu": lambda x: x.cpu(),
    "to the host": lambda x: x.to("cpu"),
    "to the host by keyword": lambda x: x.to(device=torch.device("cpu")),
    "to a host tensor": lambda x: x.to(torch.empty(1)),
    "copy to pageable memory": lambda x: torch.empty(x.shape).copy_(x),
    "copy to a part of it": lambda x: torch.zeros(99, x.shape[1])[: len(x)].copy_(x),
    "bool": lambda x: bool((x > 0).any()),
    "int": lambda x: int(x.sum()),
    "float": lambda x: float(x.sum()),
    "index": lambda x: range((x > 0).sum()),
    "slice": lambda x: x[: (x > 0).sum() * 0],
    "format": lambda x: f"{x.sum()}",
    "in": lambda x: 3.0 in x,
    "read by a mask": lambda x: x[x > 0],
    "write by a mask": lambda x: x.clone().__setitem__(x > 0, x[0, 0]),
    "put by a mask": lambda x: x.index_put((x > 0,), x[0, 0]),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "unique rows": lambda x: x.unique(dim=0),
    "unique_consecutive": torch.unique_consecutive,
    "bincount": lambda x: torch.bincount((x > 0).flatten().to(torch.int64)),
    "isin of many": lambda x: torch.isin(x[:, :1], x),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave((x[:, 0] > 0).to(torch.int64), dim=0),
    "tensor": lambda x: torch.tensor([1.0], device=x.device),
    "as_tensor": lambda x: torch.as_tensor([1.0], device=x.device),
    "asarray on the device": lambda x: torch.asarray([1.0], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "from numpy": lambda x: torch.from_numpy(np.ones(3)).to(x.device),
    "from a host tensor": lambda x: torch.zeros_like(x).copy_(torch.ones(x.shape)),
    "full of a tensor": lambda x: torch.full((2,), x[0, 0]),  # type: ignore[call-overload] # torch takes it
    "index by a list": lambda x: x[[0, 0]],
    "index by lists": lambda x: x[:, [0, 1]],
    "index by numpy": lambda x: x[np.zeros(2, np.int64)],
    "index by a host tensor": lambda x: x[torch.zeros(2, dtype=torch.int64)],
    "write by a list": lambda x: indexed(x, [0]),
}
NO_WAITS: Final[dict[str, Callable[[torch.Tensor], object]]] = {
    "arithmetic": lambda x: (x @ x.T + 1).softmax(-1).masked_fill(x[:, :1] > 0, 0),
    "another dtype": lambda x: x.to(torch.float64),
    "index by numbers": lambda x: indexed(x, (slice(None), 0)),
    "index by a tensor": lambda x: indexed(x, torch.zeros(2, dtype=torch.int64, device=x.device)),
    "upload": lambda x: x[host_arena.to_device(np.zeros(2, np.int64), x.device)],
    "copy to pinned memory": lambda x: host_arena.HostArena(x.device).start_copy([x]),
    "isin of few": lambda x: torch.isin(x, x[0, :3]),
    "the host's own numbers": lambda _: [
        torch.arange(3).tolist(),
        (torch.from_numpy(np.ones(2)) > 0).any().item(),
    ],
    "full": lambda x: torch.full((2,), 1.0, device=x.device),
}


@pytest.mark.parametrize("engine", ["float32"], indirect=True, scope="module")
@pytest.mark.parametrize("name", [*WAITS, *NO_WAITS])
def test_of_what_kernels_do_what_waits_is_found(
    engine: Engine, found: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run, called = Segment.run, list[str]()

    def other(segment: Segment, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        called.append(name)
        (WAITS | NO_WAITS)[name](hidden.clone())
        run(segment, hidden, residual)

    monkeypatch.setattr(Segment, "run", other)
    ((reply,),) = engine.run([asked("steered", num_tokens=2)])
    assert reply.failure is None
    assert called
    assert bool(found) is (name in WAITS), found


INSIDE: Final[dict[str, tuple[Any, str]]] = {
    "when a request is registered": (Registrar, "register"),
    "when one is dropped": (Registrar, "forget"),
    "in planning": (StepBuilder, "plan"),
    "in the rows of a step": (Step, "logits_rows"),
    "in a hook": (ModelPoints, "view"),
    "in collecting": (StepCollection, "collect"),
    "in the end of a step": (delivery, "_taken"),
    "in the end of a request's step": (ActiveRequest, "info"),
}


@pytest.mark.parametrize("engine", ["float32"], indirect=True, scope="module")
@pytest.mark.parametrize("place", INSIDE)
def test_in_every_phase_waits_are_found(
    engine: Engine, found: list[str], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    owner, name = INSIDE[place]
    run = getattr(owner, name)

    def waiting(*args: Any, **kwargs: Any) -> Any:
        torch.ones(1, device="cpu").item()
        return run(*args, **kwargs)

    monkeypatch.setattr(owner, name, waiting)
    engine.run([asked("inside a layer", num_tokens=3)])
    engine.run([asked("plain", num_tokens=3)])
    assert found
