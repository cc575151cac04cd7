"""A plain reference of conditions, one position after the other, and random ones to compare with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nnsight_engine.core.detector import Detector, DetectorPart, Form, Link

Array = npt.NDArray[np.float32]


def weights(rng: random.Random, *shape: int) -> Array:
    """Return random normal numbers."""
    seed = rng.randrange(1 << 30)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def random_detector(rng: random.Random, points: Sequence[str], width: int) -> Detector:
    """Return a detector of one or two parts, of any form."""
    chosen = rng.sample(points, rng.choice([1, 1, 2]))
    parts = []
    for point in chosen:
        form = rng.choice(list(Form))
        tensors = {
            Form.LINEAR: lambda: {"weights": weights(rng, width)},
            Form.MLP: lambda: {
                "hidden_weights": weights(rng, 5, width),
                "hidden_bias": weights(rng, 5),
                "weights": weights(rng, 5),
            },
            Form.DISTANCE: lambda: {"mean": weights(rng, width), "scale": weights(rng, width)},
        }[form]()
        parts.append(DetectorPart(point, form, tensors))
    return Detector(tuple(parts), rng.uniform(-1, 1), rng.choice(list(Link)), rng.uniform(-1, 1))


def random_condition(
    rng: random.Random, points: Sequence[str], width: int, named: Callable[[], Any], depth: int = 2
) -> dict[str, Any]:
    """Return the JSON of a condition; ``named`` returns a new detector, or its name."""
    join = rng.choice(["test", "test", "all", "any", "not"]) if depth else "test"
    if join == "not":
        return {"not": random_condition(rng, points, width, named, depth - 1)}
    if join != "test":
        return {
            join: [random_condition(rng, points, width, named, depth - 1) for _ in range(rng.randint(1, 3))]
        }
    test: dict[str, Any] = {rng.choice(["above", "below"]): rng.uniform(-1, 1)}
    if rng.random() < 0.5:
        at = rng.choice(points)
        test["probe"] = {"at": at, "weights": weights(rng, width).tolist(), "bias": rng.uniform(-1, 1)}
    else:
        test["detector"] = named()
    test["over"] = rng.choice(["position", "position", "prompt", "window"])
    if test["over"] == "window":
        test["of"] = rng.randint(1, 5)
    test["reduce"] = rng.choice(["max", "mean"])
    test["until"] = rng.choice(["clears", "clears", "end"])
    if test["until"] == "clears" and rng.random() < 0.5:
        test["hysteresis"] = rng.uniform(0, 1)
    return test


class PlayedTest:
    """A test, fed with one position after the other.

    Args:
        raw: Its JSON.
        detectors: Detectors by name.
        prompt_len: Length of the prompt.
    """

    def __init__(self, raw: dict[str, Any], detectors: Mapping[str, Detector], prompt_len: int) -> None:
        self.raw = raw
        self._prompt_len = prompt_len
        self.detector = (
            detectors[raw["detector"]]
            if "detector" in raw
            else Detector(
                (
                    DetectorPart(
                        raw["probe"]["at"],
                        Form.LINEAR,
                        {"weights": np.asarray(raw["probe"]["weights"], np.float32)},
                    ),
                ),
                raw["probe"]["bias"],
            )
        )
        self.scores: list[float] = []
        self.states: list[bool] = []

    @property
    def last_layer(self) -> int:
        """The last layer that it reads."""
        return max(int(part.point.split(".")[1]) for part in self.detector.parts)

    def add(self, values: dict[str, Array]) -> None:
        """Add the next position."""
        raw, sign = self.raw, 1 if "above" in self.raw else -1
        self.scores.append(sign * float(self.detector.scores(values)[0]))
        position = len(self.scores) - 1
        some = {
            "position": self.scores[-1:],
            "prompt": self.scores[: min(position + 1, self._prompt_len)],
            "window": self.scores[-raw.get("of", 1) :],
        }[raw["over"]]
        reduced = max(some) if raw["reduce"] == "max" else sum(some) / len(some)
        threshold = sign * raw["above" if sign > 0 else "below"]
        before = bool(self.states) and self.states[-1]
        if reduced > threshold or (before and raw["until"] == "end"):
            state = True
        else:
            state = before and reduced > threshold - raw.get("hysteresis", 0.0)
        self.states.append(state)


def inner_tests(raw: Any) -> list[dict[str, Any]]:
    """Return the tests of a condition, from left to right."""
    for join in ("all", "any"):
        if join in raw:
            return [test for one in raw[join] for test in inner_tests(one)]
    return inner_tests(raw["not"]) if "not" in raw else [raw]


def truth(raw: Any, states: Mapping[int, bool]) -> bool:
    """Return whether a condition holds, given the state of each test by its id."""
    if "all" in raw:
        return all(truth(one, states) for one in raw["all"])
    if "any" in raw:
        return any(truth(one, states) for one in raw["any"])
    return not truth(raw["not"], states) if "not" in raw else states[id(raw)]
