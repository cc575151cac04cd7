"""Cases that once failed, and are played before the random ones."""

from __future__ import annotations

import random

from tests.e2e.fuzz.cases import AFTER_ALL
from tests.e2e.fuzz.world import Json, World


def known_cases(world: World) -> list[list[Json]]:
    """Return the cases, for a model."""
    captures = [
        _capture_between_neighbours(world, dtype, reduce)
        for dtype in ("float16", "bfloat16")
        for reduce in ("none", "last")
    ]
    return [*captures, _mean_of_logits(world)]


def _mean_of_logits(world: World) -> list[Json]:
    """A mean at the logits, beside one whose logits are all computed."""
    ids = random.Random(1).choices(world.vocab, k=20)
    plain: Json = {
        "ids": ids,
        "interventions": [],
        "max_tokens": 3,
        "sampling": {"logprobs": 2},
        "arrives": 0,
    }
    capture = {"op": "capture", "at": "logits", "name": "read"}
    mean = {"op": "ablate", "at": "logits", "method": "mean", "where": {"range": [2, None]}}
    return [plain | {"interventions": [capture]}, plain | {"interventions": [mean]}, plain]


def _capture_between_neighbours(world: World, dtype: str, reduce: str) -> list[Json]:
    """A capture in another dtype than the server's, with plain requests on its prompt around it."""
    ids = random.Random(0).choices(world.vocab, k=70)
    at = f"layers.{world.num_layers // 3}.output"
    capture = {"op": "capture", "at": at, "reduce": reduce, "dtype": dtype, "name": "read"}
    plain: Json = {
        "ids": ids,
        "interventions": [],
        "max_tokens": 4,
        "sampling": {"logprobs": 2},
        "arrives": 0,
    }
    reading = plain | {"interventions": [capture], "arrives": AFTER_ALL}
    return [
        reading | {"arrives": 0},
        plain,
        reading,
        plain | {"arrives": AFTER_ALL},
        plain | {"arrives": AFTER_ALL + 1},
    ]
