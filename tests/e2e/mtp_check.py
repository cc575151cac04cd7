"""The usual requests beside each other, on engines whose drafts come from the model's own MTP layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.engine_kinds import EngineKind, prepared
from tests.e2e.fuzz.player import Player
from tests.e2e.fuzz.world import Json
from tests.e2e.harness import Engine
from tests.e2e.same_answers import encoded
from tests.families.checkpoints import HIDDEN_SIZE

MODEL: Final = "model"
NUM_TOKENS: Final = 24
VECTOR: Final[dict[str, Any]] = {"shape": [HIDDEN_SIZE], "as": "numbers"}
STEER: Final = {"op": "steer", "at": "layers.1.output", "vector": {"normal": 1, "norm": 100.0, **VECTOR}}
TRACED_STEER: Final = STEER | {"scale": 1.0}
CAPTURE: Final = {"op": "capture", "name": "read", "at": ["embed.output", "layers.*.output", "norm.output"]}
SAMPLES: Final = {"op": "capture", "name": "ids", "at": "samples"}
EXPERTS: Final = {
    "op": "capture",
    "name": "inside",
    "at": ["layers.3.attn.heads", "layers.3.moe.router", "layers.3.moe.output", "layers.3.mlp.output"],
}
SOME_TOKENS: Final = {"tokens": list(range(100, 220))}
PROBE: Final = {
    "op": "probe",
    "name": "scores",
    "at": "layers.3.output",
    "weights": {"normal": 2, "norm": 1.0, **VECTOR},
}
OPERATIONS: Final[dict[str, list[Json]]] = {
    "plain": [],
    "steered": [STEER],
    "captured": [CAPTURE, SAMPLES],
    "both": [STEER, CAPTURE, SAMPLES],
    "inside": [STEER | {"at": "layers.3.mlp.output"}, EXPERTS],
    "reduced": [{"op": "capture", "name": "mean", "at": "layers.3.output", "reduce": "mean"}],
    "lens": [{"op": "logit_lens", "name": "lens", "layers": [1, 3], "top_k": 3}],
    "by_token": [STEER | {"where": SOME_TOKENS}, PROBE | {"where": SOME_TOKENS}],
    "probe": [PROBE],
    "range": [STEER | {"where": {"range": [0, 20]}}, PROBE | {"where": {"range": [12, 30]}}],
    "trace": [TRACED_STEER, {"op": "capture", "name": "read", "at": "layers.3.output"}],
}


def requests() -> list[Json]:
    """Return a request for each entry of ``OPERATIONS``, in that order, which arrive one after another."""
    return [
        {
            "ids": [(7 * number + 13 * position) % 300 + 1 for position in range(8 + number)],
            "interventions": operations,
            "max_tokens": NUM_TOKENS,
            "sampling": {"logprobs": 2},
            "arrives": number // 4,
            "trace": name == "trace",
        }
        for number, (name, operations) in enumerate(OPERATIONS.items())
    ]


def check(name: str, folder: Path) -> dict[str, dict[str, int]]:
    """Play on an engine of the kind of this name, with the model in the folder.

    The answers are written as the name. Returns by request how many rows were drafted and refused.
    """
    kind, model = EngineKind.named(name), folder / MODEL
    with prepared(kind):
        vllm = VLLM(
            str(model),
            dispatch=True,
            dtype="float32",
            max_model_len=96,
            max_num_seqs=16,
            enforce_eager=True,
            **kind.options(model),
        )
    engine = Engine.around(vllm.engine)
    answers = Player(vllm, engine, requests()).play()
    assert not any(engine.held().values())
    vllm.shutdown()
    (folder / name).write_bytes(encoded(answers))
    rows = ({"drafted": answer.drafted, "refused": answer.refused} for answer in answers)
    return dict(zip(OPERATIONS, rows, strict=True))
