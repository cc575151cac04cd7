"""The same random requests on engines of several kinds, with what the engine does beside them."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from pathlib import Path
from typing import Any, Final

import torch

from nnsight_engine.core.work_context import GRAPH
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.conditional_requests import ConditionalAuthor, operation_names
from tests.e2e.engine_kinds import EngineKind
from tests.e2e.fuzz.cases import AFTER_ALL, Author
from tests.e2e.fuzz.expected import Twin
from tests.e2e.fuzz.player import Answer, Player
from tests.e2e.fuzz.world import Json, World
from tests.e2e.graphed_platform import graphed_engines
from tests.e2e.harness import Engine
from tests.e2e.same_answers import encoded

MODEL: Final = "model"
SEEDS: Final = (53, 739_949_000)
"""Of the cases: one has all that is to come up, in the other one leaves that some engines have answered."""
NUM_REQUESTS: Final = 14
"""Requests of a case, beside those with conditions and features; the engine ends empty each time."""
BLOCK: Final = 32
NUM_BLOCKS: Final = 4
"""Blocks of keys and values in the tight shape, beside the one that vLLM does not use."""
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "roomy": {"max_num_batched_tokens": 512, "max_num_seqs": 16},
    "tight": {
        "max_num_batched_tokens": 24,
        "max_num_seqs": 6,
        "num_gpu_blocks_override": NUM_BLOCKS + 1,
        "limits": EngineLimits(max_step_work=0.1),
    },
}
"""Engines that compute each prompt in one step, and such as chunk prompts, also by work, and preempt."""
_MAX_PROMPT: Final = 40
_MAX_GENERATED: Final = 20
_NEARLY_A_BLOCK: Final = BLOCK - 4
_LAST_ARRIVAL: Final = 5
_SAMPLING: Final = ("logprobs", "stop_token_ids")


def draw(world: World, seed: int, folder: Path) -> list[Json]:
    """Return the requests of a seed, greedy: random numbers are the runner's own.

    The first ones are such as need more blocks than the tight shape has, and one that leaves.
    """
    author, pick, found = Author(world, seed), random.Random(seed), list[Json]()
    while len(found) < NUM_REQUESTS:
        found += [request for request in author.case() if request["arrives"] < AFTER_ALL]
    crowd = [_growing(world, pick.choices(world.vocab, k=_NEARLY_A_BLOCK), n) for n in range(NUM_BLOCKS)]
    drawn = [
        request
        | {"arrives": min(request["arrives"], _LAST_ARRIVAL), "sampling": _greedy(request["sampling"])}
        for request in [*crowd, crowd[0] | {"leaves": 3}, *found][:NUM_REQUESTS]
    ]
    return drawn + ConditionalAuthor(world, pick, folder).requests()


def _growing(world: World, ids: list[int], number: int) -> Json:
    """Return a request that reads, and every second one that writes."""
    capture = {"op": "capture", "at": "layers.*.output", "name": "read"}
    drawn = {"normal": number, "shape": [world.widths["output"]], "norm": world.norms["output"]}
    steer = {"op": "steer", "at": "layers.1.output", "vector": {**drawn, "as": "numbers"}}
    operations = [capture] if number % 2 else [steer, capture]
    sampling = {"logprobs": 2}
    return {"ids": ids, "interventions": operations, "max_tokens": 12, "sampling": sampling, "arrives": 0}


def _greedy(sampling: Json) -> Json:
    return {name: value for name, value in sampling.items() if name in _SAMPLING}


def check(name: str, folder: Path) -> dict[str, Any]:
    """Play on an engine of a kind and a shape, such as ``sync:tight``, with the model in the folder.

    The answers are written as the name. Returns what is known of each request, and what came up.
    """
    kind_name, shape = name.split(":")
    kind, model = EngineKind.named(kind_name), folder / MODEL
    options: dict[str, Any] = {"enforce_eager": True, **kind.options(model), **SHAPES[shape]}
    with graphed_engines() if kind.has_graphs else contextlib.nullcontext():
        return _check(kind, options, model, folder / name)


def _check(kind: EngineKind, options: dict[str, Any], model: Path, to: Path) -> dict[str, Any]:
    vllm = VLLM(str(model), dispatch=True, dtype="float32", block_size=BLOCK, max_model_len=96, **options)
    engine = Engine.around(vllm.engine)
    answers, known, counts = list[Answer](), list[dict[str, Any]](), Counter[str]()
    for seed in SEEDS:
        requests = draw(_world(engine, model), seed, model.parent)
        played = Player(vllm, engine, requests).play()
        answers += played
        for request, answer in zip(requests, played, strict=True):
            answer.was_split |= len(request["ids"]) > options["max_num_batched_tokens"]
            known.append({"asked": operation_names(request), "leaves": "leaves" in request})
            counts[answer.error[0] if answer.error else "answered"] += 1
            counts["preempted"] += answer.recomputed > 0
            counts["drafted rows"] += answer.drafted
            counts["refused rows"] += answer.refused
            counts["left"] += "leaves" in request
            counts["of parts"] += "'scope'" in str(request["interventions"])
    counts.update({f"left behind: {name}": count for name, count in engine.held().items() if count})
    counts["in graphs"] = vllm.engine.collective_rpc("count_events")[-1]["steps"][GRAPH]
    vllm.shutdown()
    to.write_bytes(encoded(answers))
    return {"requests": known, "counts": dict(counts)}


def _world(engine: Engine, model: Path) -> World:
    def encode(text: str) -> list[int]:
        ids: list[int] = engine.tokenizer.encode(text, add_special_tokens=False)
        return ids

    twin = Twin(model, torch.float32, torch.float32, encode)
    engine.markers = twin.markers
    return World.of(
        engine.spec, twin, engine.tokenizer.decode, max_prompt=_MAX_PROMPT, max_generated=_MAX_GENERATED
    )
