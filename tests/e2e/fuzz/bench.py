"""A server of one model, dtype and shape, on which cases are tried.

Shapes differ in what the engine must do beside interventions: ``roomy`` has memory for all, ``tight``
splits prompts over steps and preempts requests, ``compiled`` serves taps inside the compiled step.
"""

from __future__ import annotations

import functools
import json
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, Final

import torch

from nnsight_engine.modeling.bundled import bundled_model_path
from nnsight_engine.plans.request_plan import AnswerMarkers
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.fuzz import wording
from tests.e2e.fuzz.caching import cache_faults
from tests.e2e.fuzz.expected import Twin
from tests.e2e.fuzz.judge import Judge
from tests.e2e.fuzz.player import Answer, Player
from tests.e2e.fuzz.rounds import BUNDLED, Round
from tests.e2e.fuzz.world import Json, World
from tests.e2e.harness import Engine
from tests.families.checkpoints import write_checkpoint

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "roomy": {"max_num_batched_tokens": 512},
    "tight": {"max_num_batched_tokens": 48, "max_num_seqs": 8, "num_gpu_blocks_override": 8},
    "compiled": {"enforce_eager": False, "compilation_config": {"backend": "eager"}},
}
_MAX_LEN: Final = 192
_WIDER: Final = {"float32": torch.float64, "bfloat16": torch.float32}
_NO_POSITION: Final = frozenset({"contradictory_where", "empty_where", "position_out_of_range"})
_MEAN_ONLY: Final = frozenset({"unsupported_combination", "contradictory_where"})


class Bench:
    """The server and its twins, and what has come up; ``close`` it in the end."""

    def __init__(self, played: Round, folder: Path) -> None:
        is_large = played.family == BUNDLED
        model = bundled_model_path() if is_large else write_checkpoint(played.family, folder / "model")
        options = {"enforce_eager": True, "max_num_seqs": 64, **SHAPES[played.shape]}
        if "num_gpu_blocks_override" in options:
            options["num_gpu_blocks_override"] *= _num_kinds_of_attention(model)
        self._model = VLLM(
            str(model),
            dispatch=True,
            dtype=played.dtype,
            block_size=32,
            max_model_len=_MAX_LEN,
            enable_prefix_caching=True,
            **options,
        )
        self.engine = Engine.around(self._model.engine)
        self._encode = functools.cache(self._token_ids)
        dtype = getattr(torch, played.dtype)
        rounded = Twin(model, dtype, dtype, self._encode)
        is_slow = is_large and played.dtype == "float32"  # in float64, that is
        exact = rounded if is_slow else Twin(model, dtype, _WIDER[played.dtype], self._encode)
        self.engine.markers = rounded.markers
        self._judge = Judge(exact, rounded, played.dtype)
        self.counts: Counter[str] = Counter()
        self.world = World.of(
            self.engine.spec,
            rounded,
            self.engine.tokenizer.decode,
            max_prompt=60 if is_large else 120,
            max_generated=8 if is_large else 32,
        )

    def close(self) -> None:
        self._model.shutdown()

    def _token_ids(self, text: str) -> list[int]:
        ids: list[int] = self.engine.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def faults(self, requests: list[Json]) -> list[str]:
        """Play a case and return what is wrong with its answers."""
        self.counts["cases"] += 1
        try:
            return self._faults(requests)
        except Exception:  # noqa: BLE001 - whatever it is, it is a finding, and other cases go on
            return [traceback.format_exc()]

    def _faults(self, requests: list[Json]) -> list[str]:
        answers = Player(self._model, self.engine, requests).play()
        found = []
        for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            self._count(request, answer)
            faults = self._refusal(request, answer.error) if answer.error else self._answered(request, answer)
            faults += cache_faults(index, requests, answers)
            found += [f"request {index}: {fault}" for fault in faults]
        return found

    def left_behind(self) -> dict[str, int]:
        return {name: count for name, count in self.engine.held().items() if count}

    def _answered(self, request: Json, answer: Answer) -> list[str]:
        sampling = request["sampling"]
        found = []
        for choice in answer.choices:
            found += self._judge.faults(request, choice)
        if answer.choices and "prompt_logprobs" in sampling and not answer.choices[0].prompt_logprobs:
            found.append("the log-probabilities of its prompt did not come")
        count = sampling.get("n", 1)
        if not answer.choices and "leaves" not in request:
            found.append("it was not answered")
        elif answer.choices and len(answer.choices) != count:
            found.append(f"it has {len(answer.choices)} choices, not {count}")
        return found

    def _refusal(self, request: Json, error: tuple[str, str]) -> list[str]:
        """Return what is wrong with a refusal: only clauses that name nothing, and means, may be refused."""
        code, message = error
        operations = request["interventions"]
        if code == "chunked_trace":
            return []  # as documented: a block that asks at every step needs its prompt in one
        if code in _MEAN_ONLY and any(op.get("method") == "mean" for op in operations):
            return []
        ids = request["ids"]
        total = len(ids) + request["max_tokens"] - 1
        if code == "unsupported_combination" and "prompt_logprobs" in request["sampling"]:
            writes = filter(wording.is_write, operations)
            if any("logits" in wording.points(op, self.world.num_layers) for op in writes):
                return []
        if code in _NO_POSITION and any(
            _names_nothing(op.get("where", {}), ids, total, self._encode, self.engine.markers)
            for op in operations
        ):
            return []
        if code == "invalid_value" and any(_patches_twice(op, len(ids)) for op in operations):
            return []
        return [f"it was refused: {code}, {message}"]

    def _count(self, request: Json, answer: Answer) -> None:
        self.counts["requests"] += 1
        self.counts["choices judged"] += len(answer.choices)
        self.counts["operations judged"] += len(answer.choices) * len(request["interventions"])
        self.counts["preempted"] += answer.recomputed > 0
        self.counts["from the cache"] += answer.cached > 0
        self.counts["with prompt_logprobs"] += "prompt_logprobs" in request["sampling"]
        self.counts["with cache_salt"] += "cache_salt" in request
        self.counts["streams with patterns"] += request.get("stream", False) and any(
            "attn.pattern" in str(op.get("at")) for op in request["interventions"]
        )
        if answer.error:
            self.counts[f"refused with {answer.error[0]}"] += 1


def _num_kinds_of_attention(model: Path) -> int:
    """Return in how many groups vLLM keeps keys and values: a sliding window has blocks of its own."""
    config = json.loads((model / "config.json").read_text())
    return len(set(config.get("layer_types") or ["full_attention"]))


def _names_nothing(
    where: Json, ids: list[int], total: int, encode: wording.Encode, markers: AnswerMarkers
) -> bool:
    """Return whether a clause names no position, or one that the request does not have."""
    clauses = [where, where.get("exclude", {})]
    named = [wording.at_end(p, len(ids)) for clause in clauses for p in clause.get("positions", [])]
    beyond = any(
        wording.at_end(p, len(ids)) >= len(ids)
        for clause in clauses
        if clause.get("phase") == "prompt"
        for p in clause.get("positions", [])
    )
    bounds = [p for clause in clauses for p in clause.get("range", []) if p is not None]
    outside = any(not 0 <= p < total for p in named) or any(not -len(ids) <= p < total for p in bounds)
    return (
        beyond
        or outside
        or _is_empty(clauses, len(ids))
        or not wording.may_name_one(where, ids, total, encode, markers)
    )


def _patches_twice(op: Json, prompt_len: int) -> bool:
    """Return whether a patch made for a prompt of another length has a position twice for this one."""
    positions = op.get("where", {}).get("positions", [])
    return op["op"] == "patch" and len({wording.at_end(p, prompt_len) for p in positions}) < len(positions)


def _is_empty(clauses: list[Json], prompt_len: int) -> bool:
    ranges = [clause["range"] for clause in clauses if "range" in clause]
    return any(
        stop is not None and wording.at_end(start, prompt_len) >= wording.at_end(stop, prompt_len)
        for start, stop in ranges
    )
