"""Conditions on the real model: random requests against a reference on values that they capture."""

from __future__ import annotations

import random
from typing import Any, Final

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from api_schemas.conditions import NamedDetector
from api_schemas.detectors import DetectorUsed
from nnsight_engine.core.detector import Detector
from nnsight_engine.plans.collect.results import CollectedMarks, CollectedScores
from nnsight_engine.plans.request_plan import PLAN_KEY
from tests.condition_reference import PlayedTest, inner_tests, random_condition, random_detector, truth
from tests.e2e.harness import Ask, Engine, Reply, random_vector
from tests.narrow_model import WIDTH

pytestmark = pytest.mark.e2e

POINTS: Final = ["layers.4.output", "layers.9.output", "layers.14.mlp.output", "layers.20.output"]
STEERED: Final = "layers.12.output"
PROMPTS: Final = (
    "The Eiffel Tower is in the city of",
    "I think this movie is wonderful, and",
    "Once upon a time there was a king who had no crown, and he asked the people of the town for",
)


@pytest.fixture
def engine(chunked_engine: Engine) -> Engine:
    return chunked_engine


class RandomRequest:
    """A request with a conditional steer, a flag and a score; it captures all that these read."""

    def __init__(self, rng: random.Random) -> None:
        self.detectors: dict[str, Detector] = {}
        self.prompt = rng.choice(PROMPTS)
        self.max_tokens = rng.randint(8, 24)
        is_early = rng.random() < 0.5
        self.when = self._scaled(rng, POINTS[:2] if is_early else POINTS)
        self.where = {} if is_early else {"phase": "generated"}
        self.flag = self._scaled(rng, POINTS)
        self.detector = self._named(rng)
        self.vector = random_vector(rng.randrange(1000))

    def _scaled(self, rng: random.Random, points: list[str]) -> dict[str, Any]:
        """Return a random condition whose thresholds lie among the scores that occur."""
        raw = random_condition(rng, points, WIDTH, lambda: self._named(rng))
        for test in inner_tests(raw):
            (sign,) = {"above", "below"} & test.keys()
            test[sign] *= 20
            test["hysteresis"] = test.get("hysteresis", 0.0) * 10
        return raw

    def _named(self, rng: random.Random) -> str:
        name = f"d{len(self.detectors)}"
        self.detectors[name] = random_detector(rng, POINTS[:2], WIDTH)
        return name

    def _resolved(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: self._used(one) if key == "detector" else self._resolved(one)
                for key, one in value.items()
            }
        return [self._resolved(one) for one in value] if isinstance(value, list) else value

    def _used(self, name: str) -> NamedDetector:
        return NamedDetector.of(DetectorUsed(name=name, version=1, id=name), self.detectors[name])

    def ask(self) -> Ask:
        steer = {"op": "steer", "at": STEERED, "vector": self.vector, "where": self.where, "when": self.when}
        return Ask(
            self.prompt,
            self._resolved(
                [
                    {"op": "capture", "at": STEERED, "name": "before"},
                    steer,
                    {"op": "capture", "at": STEERED, "name": "after"},
                    {"op": "capture", "at": POINTS, "name": "read"},
                    {"op": "flag", "when": self.flag, "name": "flag"},
                    {"op": "detect", "detector": self.detector, "name": "score"},
                ]
            ),
            max_tokens=self.max_tokens,
            sampling={"ignore_eos": True},
        )

    def check(self, reply: Reply) -> int:
        """Compare an answer with the reference; return the number of positions that depend on conditions."""
        assert reply.collected is not None, reply.failure
        values = {point: reply.tensor("read", point).numpy() for point in POINTS}
        count = len(values[POINTS[0]])
        prompt_len = count - self.max_tokens + 1
        steers, flags = (
            [PlayedTest(raw, self.detectors, prompt_len) for raw in inner_tests(when)]
            for when in (self.when, self.flag)
        )
        is_next = [one.last_layer >= int(STEERED.split(".")[1]) + 1 for one in steers]
        acted, flagged = [], []
        for position in range(count):
            row = {point: value[position : position + 1] for point, value in values.items()}
            for test in (*steers, *flags):
                test.add(row)
            states = {
                id(one.raw): one.states[position - late] if position >= late else False
                for one, late in zip(steers, is_next, strict=True)
            }
            if (not self.where or position >= prompt_len) and truth(self.when, states):
                acted.append(position)
            if truth(self.flag, {id(one.raw): one.states[position] for one in flags}):
                flagged.append(position)
        assert reply.collected.applied[1].positions == acted
        assert reply.collected.applied[1].decides == ["next" if one else "same" for one in is_next]
        flag, score = reply.result("flag"), reply.result("score")
        assert isinstance(flag, CollectedMarks)
        assert isinstance(score, CollectedScores)
        assert flag.positions == flagged
        np.testing.assert_allclose(
            score.scores, self.detectors[self.detector].scores(values), rtol=1e-3, atol=1e-3
        )
        change = reply.tensor("after", STEERED) - reply.tensor("before", STEERED)
        expected = torch.zeros(count, 1)
        expected[acted] = 1
        torch.testing.assert_close(change, expected * torch.tensor(self.vector), rtol=1e-4, atol=2e-3)
        eligible = count - (prompt_len if self.where else 0)
        return min(len(acted), eligible - len(acted)) + min(len(flagged), count - len(flagged))


@pytest.mark.parametrize("seed", range(3))
def test_random_conditions_hold_where_a_reference_says(engine: Engine, seed: int) -> None:
    rng = random.Random(seed)
    requests = [RandomRequest(rng) for _ in range(8)]
    replies = engine.run([request.ask() for request in requests])
    varied = sum(request.check(reply) for request, (reply,) in zip(requests, replies, strict=True))
    assert varied > 0


def _probe(sign: float, threshold: float) -> dict[str, Any]:
    return {
        "probe": {"at": "layers.9.output", "weights": [sign, *[0.0] * (WIDTH - 1)]},
        "above": threshold,
    }


def _scores(engine: Engine, prompt: str, max_tokens: int) -> tuple[list[float], Reply]:
    probe = {"op": "probe", "at": "layers.9.output", "weights": [1.0, *[0.0] * (WIDTH - 1)], "name": "p"}
    ((reply,),) = engine.run([Ask(prompt, [probe], max_tokens=max_tokens, sampling={"ignore_eos": True})])
    found: Any = reply.result("p")
    return found.points["layers.9.output"], reply


@pytest.mark.parametrize("over", ["generated", "prompt"])
def test_a_choice_ends_where_a_condition_holds(engine: Engine, over: str) -> None:
    scores, plain = _scores(engine, PROMPTS[0], 20)
    prompt_len = len(scores) - 19
    own = scores[prompt_len:]
    first = max(range(4, 15), key=lambda index: own[index] - max(own[:index]))
    threshold = (own[first] + max(own[:first])) / 2
    where = {"phase": "generated"}
    if over == "prompt":
        threshold, where, first = min(scores[:prompt_len]) - 1, {"phase": "prompt"}, -1
    stop = {"op": "stop", "when": _probe(1.0, threshold), "where": where, "name": "enough"}
    ((reply,),) = engine.run([Ask(PROMPTS[0], [stop], max_tokens=20, sampling={"ignore_eos": True})])
    assert reply.token_ids == plain.token_ids[: first + 1]
    result = reply.result("enough")
    assert isinstance(result, CollectedMarks)
    assert result.positions[0] == (prompt_len + first if over == "generated" else 0)


def test_a_stop_in_the_first_chunk_of_a_prompt_ends_it(engine: Engine) -> None:
    prompt = " ".join(PROMPTS) * 3
    stop = {"op": "stop", "when": _probe(1.0, -1e6), "name": "s"}
    ((reply,),) = engine.run([Ask(prompt, [stop], max_tokens=4)])
    assert reply.token_ids == []
    marks: Any = reply.result("s")
    # A draft model takes a place of the step's 32.
    assert marks.positions in ([*range(32)], [*range(31)])


def test_a_request_that_fails_where_it_stops_ends_alone(engine: Engine) -> None:
    """Its first operation has a vector that is too narrow, behind admission's back."""
    stop = {"op": "stop", "when": _probe(1.0, -1e6), "name": "s"}

    def steering(seed: int) -> Ask:
        steer = {"op": "steer", "at": "layers.1.output", "vector": random_vector(seed, WIDTH)}
        return Ask(" ".join(["one two three four five"] * 4), [steer, stop], max_tokens=4)

    def narrow(params: SamplingParams) -> None:
        tensors = (params.extra_args or {})[PLAN_KEY]["tensors"]
        tensors[next(iter(tensors))] = ("float32", [3], bytes(12))

    broken = engine.submit(steering(1), narrow)
    whole = [engine.submit(steering(2)) for _ in range(2)]
    (failed,), *others = engine.finish([broken, *whole])
    assert failed.failure is not None
    assert all(one.failure is None and one.token_ids == [] for (one,) in others)
    ((plain,),) = engine.run([Ask(PROMPTS[0], [], max_tokens=4)])
    assert len(plain.token_ids) == 4


def test_stops_and_flags_leave_neighbours_alone(engine: Engine) -> None:
    plain = [one for (one,) in engine.run([Ask(prompt, [], max_tokens=12) for prompt in PROMPTS])]
    stop = {"op": "stop", "when": _probe(1.0, -1e6), "where": {"phase": "generated"}, "name": "s"}
    asks = [Ask(prompt, [stop] if index == 1 else [], max_tokens=12) for index, prompt in enumerate(PROMPTS)]
    replies = [one for (one,) in engine.run(asks)]
    assert [replies[index].token_ids for index in (0, 2)] == [plain[index].token_ids for index in (0, 2)]
    assert replies[1].token_ids == plain[1].token_ids[:1]


def test_choices_have_conditions_of_their_own(engine: Engine) -> None:
    """Each sampled answer is judged by its own values."""
    flag = {"op": "flag", "when": _probe(1.0, 0.0), "name": "f"}
    probe = {"op": "probe", "at": "layers.9.output", "weights": [1.0, *[0.0] * (WIDTH - 1)], "name": "p"}
    sampling = {"n": 3, "temperature": 1.5, "seed": 1, "ignore_eos": True}
    (replies,) = engine.run([Ask(PROMPTS[1], [flag, probe], max_tokens=12, sampling=sampling)])
    for reply in replies:
        found: Any = reply.result("p")
        marks: Any = reply.result("f")
        scores = found.points["layers.9.output"]
        assert marks.positions == [index for index, score in enumerate(scores) if score > 0]
    assert len({tuple(reply.token_ids) for reply in replies}) > 1
