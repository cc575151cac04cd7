"""Compares an answer with what transformers computes: which positions, and within rounding which values.

How far rounding may lead is measured, not guessed: a server is compared with the next wider arithmetic on the
same rounded weights (bfloat16 with float32, float32 with float64), and may be off by some times what
transformers in the server's dtype is off by, in the norm of a row, and by a floor that is far below what the
smallest write of a case does. The row that rounds worst counts for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.plans.collect.collector import OperationResult
from nnsight_engine.plans.collect.results import (
    CollectedCapture,
    CollectedFeatures,
    CollectedLens,
    CollectedMarks,
    CollectedProbe,
    CollectedResults,
    CollectedScores,
    CollectedSites,
    CollectedTrace,
)
from tests.e2e.fuzz import wording
from tests.e2e.fuzz.expected import Expected, Op, Twin
from tests.e2e.fuzz.nearness import as_tensor, reduced, rows_faults, target_faults, top_faults
from tests.e2e.fuzz.world import Json

Result = OperationResult
PromptLogprobs = list[dict[int, float]]
"""By prompt position, the log-probabilities of the token there and of the likeliest; the first has none."""

TIMES: Final = 4.0
"""How many times as far off as transformers in the server's dtype a row may be."""
FLOORS: Final = {"float32": 3e-4, "bfloat16": 1e-2}
"""How far off a row may always be, as a part of its norm, by the server's dtype."""
ROUNDING: Final = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "int64": 0.0}
_UNMEASURED: Final = 5.0
LOG_FLOORS: Final = {"float32": 2e-3, "bfloat16": 5e-2}
"""How far off a log-probability may always be, in nats."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One choice of an answer.

    Attributes:
        token_ids: Generated.
        logprobs: By generated token, the log-probabilities that came with it; empty without any.
        collected: What the interventions brought, None without any.
        prompt_logprobs: Each time that the request's came; the first of its choices has them.
        failure: Error that the collector raised instead of results.
    """

    token_ids: list[int]
    logprobs: list[dict[int, float]]
    collected: CollectedResults | None
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    failure: InterventionError | None = None


class Judge:
    """Compares answers of a server of one dtype.

    Args:
        exact: The model with the server's weights, computing in more than the server's dtype.
        rounded: The same in the server's dtype; ``exact`` itself where that takes too long.
        dtype: The server's.
    """

    def __init__(self, exact: Twin, rounded: Twin, dtype: str) -> None:
        self._exact, self._rounded, self._dtype = exact, rounded, dtype

    def faults(self, request: Json, choice: Choice) -> list[str]:
        ids, operations, sampling = request["ids"], request["interventions"], request["sampling"]
        fed = [*ids, *choice.token_ids][:-1]
        exact = self._exact.run(fed, len(ids), operations)
        is_measured = self._rounded is not self._exact
        rounded = self._rounded.run(fed, len(ids), operations) if is_measured else exact
        comparison = _Comparison(exact, rounded, self._dtype, operations, self._exact)
        found = comparison.tokens(len(ids), choice, greedy=sampling.get("temperature", 0.0) == 0.0)
        for given in choice.prompt_logprobs:
            found += comparison.prompt(ids, given, sampling.get("prompt_logprobs"))
        if choice.failure is not None:
            found += comparison.overflow(choice.failure)
        elif operations:
            assert choice.collected is not None
            found += comparison.results(choice.collected, len(ids), choice.token_ids)
        return found


class _Comparison:
    def __init__(
        self, exact: Expected, rounded: Expected, dtype: str, operations: Sequence[Op], twin: Twin
    ) -> None:
        self._exact, self._rounded, self._dtype = exact, rounded, dtype
        # Where rounding is not measured, a floor stands for it.
        self._unmeasured = _UNMEASURED if rounded is exact else 1.0
        self._operations, self._num_layers, self._encode = operations, twin.num_layers, twin.encode
        self._log_slack = self._log_bound(exact.logits, rounded.logits)

    def tokens(self, prompt_len: int, choice: Choice, *, greedy: bool) -> list[str]:
        logprobs = self._exact.logits.log_softmax(dim=-1)[prompt_len - 1 :]
        found = []
        for step, token in enumerate(choice.token_ids):
            lacks = float(logprobs[step].max() - logprobs[step, token])
            if greedy and lacks > 2 * self._log_slack:
                best = int(logprobs[step].argmax())
                found.append(f"token {step} is {token}, {lacks:.4f} nats less likely than {best}")
        for step, given in enumerate(choice.logprobs):
            for token, logprob in given.items():
                off = abs(float(logprobs[step, token]) - logprob)
                if off > self._log_slack:
                    found.append(f"the log-probability of {token} at token {step} is off by {off:.4f}")
        return found[:3]

    def prompt(self, ids: list[int], given: PromptLogprobs, top_k: int | None) -> list[str]:
        if top_k is None or len(given) != len(ids) or given[0]:
            return [f"the prompt of {len(ids)} has {len(given)} log-probabilities, {top_k} were asked for"]
        logprobs = self._exact.logits.log_softmax(dim=-1)
        found = []
        for position, (token, step) in enumerate(zip(ids[1:], given[1:], strict=True), start=1):
            wanted = logprobs[position - 1]
            others = {other: value for other, value in step.items() if other != token}
            worst = max((abs(float(wanted[t]) - value) for t, value in step.items()), default=0.0)
            least = float(wanted.topk(top_k).values[-1]) if top_k else 0.0
            if token not in step or not top_k - 1 <= len(others) <= top_k:
                found.append(f"the prompt's {token} at {position} came with {list(step)}")
            elif worst > self._log_slack:
                found.append(f"a log-probability at the prompt's {position} is off by {worst:.4f}")
            elif any(least - float(wanted[other]) > 2 * self._log_slack for other in others):
                found.append(f"{list(others)} are not the likeliest at the prompt's {position}")
        return found[:3]

    def overflow(self, failure: InterventionError) -> list[str]:
        """Return that a failure is wrong, unless a capture in float16 has a number beyond it."""
        largest = torch.finfo(torch.float16).max
        for index, op in enumerate(self._operations):
            if op["op"] != "capture" or op.get("dtype") != "float16" or failure.code != "not_finite":
                continue
            for point, rows in self._exact.seen[index].rows.items():
                slack = self._row_bound(rows, self._rounded.seen[index].rows[point])
                kept = reduced(rows, op.get("reduce", "none"))
                if f"`{op['name']}`" in failure.message and float(kept.abs().max()) > largest - slack:
                    return []
        return [f"its results failed: {failure.code}, {failure.message}"]

    def results(self, collected: CollectedResults, prompt_len: int, token_ids: list[int]) -> list[str]:
        """Return what is wrong with the results and with where they say that they applied."""
        found = [] if collected.is_code else self._applied(collected.applied, prompt_len)
        by_name = {result.name: result for result in collected.results}
        if len(by_name) < len(collected.results):
            found.append("a result comes twice")
        for index, op in enumerate(self._operations):
            result = by_name.pop(op.get("name", ""), None)
            if op["op"] not in {"capture", "probe", "logit_lens"}:
                continue
            found += [
                f"{op['name']}: {fault}" for fault in self._result(index, op, result, prompt_len, token_ids)
            ]
        return found + [f"there is a result {name}" for name in by_name]

    def _positions(self, index: int, op: Op, prompt_len: int) -> list[int]:
        positions = self._exact.positions[index]
        return [p for p in positions if p >= prompt_len - 1] if op.get("at") == "samples" else positions

    def _applied(self, applied: list[CollectedSites], prompt_len: int) -> list[str]:
        if [entry.op for entry in applied] != [op["op"] for op in self._operations]:
            return [f"applied names {[entry.op for entry in applied]}"]
        found = []
        for index, (entry, op) in enumerate(zip(applied, self._operations, strict=True)):
            wanted = self._positions(index, op, prompt_len)
            if entry.positions != wanted:
                found.append(f"operation {index} applied at {entry.positions}, not {wanted}")
            if entry.at != wording.points(op, self._num_layers):
                found.append(f"operation {index} applied at {entry.at}")
        return found

    def _result(
        self,
        index: int,
        op: Op,
        result: Result | CollectedTrace | None,
        prompt_len: int,
        token_ids: list[int],
    ) -> list[str]:
        wanted = self._positions(index, op, prompt_len)
        if isinstance(result, CollectedTrace | CollectedScores | CollectedFeatures | CollectedMarks):
            return ["it is a trace's"]
        if not wanted:
            return (
                []
                if result is None or result.positions == []
                else [f"positions {result.positions}, not none"]
            )
        reduce = op.get("reduce", "none")
        wanted = wanted[-1:] if reduce == "last" else wanted
        if result is None:
            return [f"there is no result, of positions {wanted}"]
        if list(result.positions) != wanted:
            return [f"positions are {result.positions}, not {wanted}"]
        match result:
            case CollectedLens():
                return self._lens(index, op, result)
            case CollectedProbe():
                return self._probe(index, op, result)
            case _:
                return self._capture(index, op, result, prompt_len, token_ids)

    def _capture(
        self, index: int, op: Op, result: CollectedCapture, prompt_len: int, token_ids: list[int]
    ) -> list[str]:
        found = []
        if list(result.points) != wording.points(op, self._num_layers):
            return [f"points are {list(result.points)}"]
        reduce = op.get("reduce", "none")
        for point, tensor in result.points.items():
            got = as_tensor(tensor)
            if point == "samples":
                wanted = [token_ids[p - prompt_len + 1] for p in result.positions]
                if got.reshape(-1).tolist() != wanted:
                    found.append(f"samples are {got.tolist()}, not {wanted}")
                continue
            asked = op.get("dtype", self._dtype)
            if tensor.dtype != asked:
                found.append(f"{point} is {tensor.dtype}, not {asked}")
            exact, rounded = (e.seen[index].rows[point] for e in (self._exact, self._rounded))
            bound = self._row_bound(exact, rounded)
            exact = reduced(exact, reduce)
            if point.endswith("attn.pattern"):
                exact = exact[..., : result.positions[-1] + 1]
            # In neither dtype is a row nearer than rounding, however large it is beside the others.
            rounding = max(ROUNDING[asked], ROUNDING[self._dtype])
            found += rows_faults(point, got, exact, bound, rounding)
        return found

    def _probe(self, index: int, op: Op, result: CollectedProbe) -> list[str]:
        found = []
        if list(result.points) != wording.points(op, self._num_layers):
            return [f"points are {list(result.points)}"]
        for point, values in result.points.items():
            exact, rounded = self._exact.seen[index], self._rounded.seen[index]
            before = exact.before[point]
            off = self._row_bound(before, rounded.before[point])
            # What is off has no more to do with the weights than chance would have it.
            bound = 4 * off * op["weights"]["norm"] / before.shape[-1] ** 0.5
            got = torch.tensor(values).unsqueeze(-1)
            found += rows_faults(point, got, exact.rows[point], bound + 1e-4, 0.0)
        return found

    def _lens(self, index: int, op: Op, result: CollectedLens) -> list[str]:
        found = []
        layers = wording.lens_layers(op["layers"], self._num_layers)
        asked = wording.token_ids(op.get("targets", []), self._encode)
        if sorted(result.layers) != sorted(layers):
            return [f"layers are {sorted(result.layers)}, not {layers}"]
        for layer in layers:
            point = f"layers.{layer}.output"
            exact, rounded = (e.seen[index].rows[point] for e in (self._exact, self._rounded))
            slack = self._log_bound(exact, rounded)
            rows = exact.log_softmax(dim=-1)
            seen = list(result.layers[layer].rows())
            if len(seen) != len(rows):
                found.append(f"layer {layer} has {len(seen)} rows, not {len(rows)}")
                continue
            for position, logprobs, (top, targets) in zip(result.positions, rows, seen, strict=True):
                faults = top_faults(top, logprobs, op["top_k"], slack) + target_faults(
                    targets, logprobs, slack
                )
                if [token.id for token in targets] != asked:
                    faults.append(f"the targets are {[token.id for token in targets]}, not {asked}")
                found += [f"layer {layer} at {position}: {fault}" for fault in faults]
        return found[:3]

    def _row_bound(self, exact: torch.Tensor, rounded: torch.Tensor) -> float:
        exact, rounded = exact.flatten(1), rounded.flatten(1)
        if not len(exact):
            return 0.0
        measured = float((exact - rounded).norm(dim=-1).max())
        return TIMES * measured + self._unmeasured * FLOORS[self._dtype] * float(exact.norm(dim=-1).mean())

    def _log_bound(self, exact: torch.Tensor, rounded: torch.Tensor) -> float:
        if not len(exact):
            return 0.0
        off = exact.log_softmax(dim=-1) - rounded.log_softmax(dim=-1)
        return TIMES * float(off.abs().max()) + self._unmeasured * LOG_FLOORS[self._dtype]
