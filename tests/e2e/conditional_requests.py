"""Random requests with conditions, scores and features, for engines that are compared with each other.

Scores of random directions are spread over some norms of the values, so that hardly any is as near to its
threshold as two engines differ by rounding.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.torch import save_file

from api_schemas.conditions import NamedDetector
from api_schemas.detectors import DetectorUsed
from api_schemas.dictionaries import DictionaryUsed, NamedDictionary
from nnsight_engine.features.config import Architecture, DictionaryConfig, Normalization, StoredDictionary
from tests.condition_reference import inner_tests, random_condition, random_detector
from tests.e2e.fuzz.world import Json, World
from tests.unit.features.reference import some_tensors

CONDITIONAL: Final = "when"
"""Names, among the operations of a request, that one of them has a condition."""
OF_ONE_STAGE: Final = frozenset({CONDITIONAL, "detect", "flag", "stop"})
"""What a model over several stages refuses."""
_NUM_FEATURES: Final = 24
_DICTIONARY_AT: Final = "layers.1.output"
_EARLY: Final = ["layers.0.output", "layers.1.mlp.output"]
_POINTS: Final = [*_EARLY, "layers.2.output", "layers.3.output"]
_STEERED: Final = "layers.2.output"
"""Where writes are: behind the early points."""


def operation_names(request: Json) -> list[str]:
    """Return what a request asks for: its operations, conditions, a trace, and further choices."""
    operations, sampling = request["interventions"], request["sampling"]
    return [
        *(operation["op"] for operation in operations),
        *(CONDITIONAL for operation in operations if CONDITIONAL in operation),
        *(name for name in ("n", "prompt_logprobs") if name in sampling),
        *(["trace"] if "trace" in request else []),
    ]


class ConditionalAuthor:
    """Writes requests, and their dictionary into a folder."""

    def __init__(self, world: World, pick: random.Random, folder: Path) -> None:
        self._world, self._pick = world, pick
        self._width = world.widths["output"]
        config = DictionaryConfig(
            Architecture.STANDARD,
            self._width,
            _NUM_FEATURES,
            self._width,
            Normalization.NONE,
            subtracts_decoder_bias=False,
        )
        tensors = some_tensors(np.random.default_rng(0), config)
        path = folder / "dictionary.safetensors"
        save_file(tensors, path)
        stored = StoredDictionary(config, _DICTIONARY_AT, _DICTIONARY_AT, "features", str(path), "float32")
        used = DictionaryUsed(name="features", version=1, id="features")
        self._dictionary = NamedDictionary.of(used, stored, None)

    def requests(self) -> list[Json]:
        """Return one request for each form of operation, of prompts of their own."""
        changed = {"op": "feature", "dictionary": self._dictionary, "changes": self._changes()}
        read = {"op": "features", "dictionary": self._dictionary}
        given = {**read, "features": self._pick.sample(range(_NUM_FEATURES), 3), "name": "given"}
        flag = {"op": "flag", "when": self._when(_POINTS), "name": "flag"}
        stop = {"op": "stop", "when": self._when(_POINTS), "where": {"phase": "generated"}, "name": "stop"}
        detect = {"op": "detect", "detector": self._named(), "name": "score"}
        capture = {"op": "capture", "at": "layers.*.output", "name": "read"}
        weights = {"normal": 0, "shape": [self._width], "norm": 1.0, "as": "numbers"}
        probe = {"op": "probe", "at": _STEERED, "weights": weights, "name": "probed"}
        feature = {"dictionary": self._dictionary, "feature": self._pick.randrange(_NUM_FEATURES)}
        active = {"op": "flag", "when": feature, "name": "active"}
        return [
            self._request([self._write("steer", vector=self._vector()), detect, flag]),
            self._request([self._write("ablate"), {**read, "top_k": 3, "name": "top"}, capture]),
            self._request([self._patch(), capture, flag]),
            self._request([changed | {"when": self._when(_EARLY[:1])}, active, capture]) | {"stream": True},
            self._request([stop, capture]),
            # The likeliest token, also where vLLM asks for a temperature.
            self._request([changed, given, probe, capture], n=2, temperature=1.0, top_k=1, prompt_logprobs=1),
        ]

    def _request(self, operations: list[Json], **sampling: Any) -> Json:
        pick = self._pick
        return {
            "ids": pick.choices(self._world.vocab, k=pick.randint(4, self._world.max_prompt)),
            "interventions": operations,
            "max_tokens": pick.randint(6, self._world.max_generated),
            "sampling": {"logprobs": 2, **sampling},
            "arrives": pick.randint(0, 5),
        }

    def _vector(self, *rows: int) -> Json:
        norm = round(self._world.norms["output"], 3)
        return {
            "normal": self._pick.randrange(2**31),
            "shape": [*rows, self._width],
            "norm": norm,
            "as": "numbers",
        }

    def _write(self, name: str, **fields: Any) -> Json:
        """Return a write of which all tests read early, or of generated positions, which may wait for one."""
        if self._pick.random() < 0.5:
            return {"op": name, "at": _STEERED, **fields, "when": self._when(_EARLY)}
        where = {"phase": "generated"}
        return {"op": name, "at": _STEERED, **fields, "where": where, "when": self._when(_POINTS)}

    def _patch(self) -> Json:
        where = {"positions": [0, 2, -1]}
        return {
            "op": "patch",
            "at": _STEERED,
            "values": self._vector(3),
            "where": where,
            "when": self._when(_EARLY),
        }

    def _changes(self) -> list[Json]:
        features = self._pick.sample(range(_NUM_FEATURES), 3)
        return [
            {"feature": features[0], "mode": "set", "value": round(self._pick.uniform(1, 4), 3)},
            {"feature": features[1], "mode": "add", "value": 1.0},
            {"feature": features[2], "mode": "ablate"},
        ]

    def _named(self) -> NamedDetector:
        name = f"detector-{self._pick.randrange(2**31)}"
        detector = random_detector(self._pick, _EARLY, self._width)
        return NamedDetector.of(DetectorUsed(name=name, version=1, id=name), detector)

    def _when(self, points: list[str]) -> Json:
        """Return a condition whose thresholds lie among the scores that occur."""
        found = random_condition(self._pick, points, self._width, self._named)
        for test in inner_tests(found):
            (bound,) = {"above", "below"} & test.keys()
            test[bound] *= self._world.norms["output"]
            test["hysteresis"] = test.get("hysteresis", 0.0) * self._world.norms["output"]
        return found
