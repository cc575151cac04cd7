"""Random operations on features of a toy model, in random steps, against a plain reference row by row."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from api_schemas.dictionaries import DictionaryUsed, NamedDictionary
from api_schemas.errors import ApiError
from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.features.config import Architecture, Normalization
from nnsight_engine.features.dictionary import Dictionary, Selection
from nnsight_engine.features.stored import StoredDictionary
from nnsight_engine.plans.collect.results import CollectedFeatures, CollectedMarks
from nnsight_engine.plans.features import PlannedDictionary, PlannedFeatures
from nnsight_engine.plans.request_plan import CompiledRequest
from nnsight_engine.plans.step import dictionary_bank, feature_kernels, feature_reads
from nnsight_engine.plans.step.dictionary_bank import DictionaryBank
from tests.condition_reference import Array, weights
from tests.unit.features.reference import Reference, some_config, some_tensors
from tests.unit.plans import compiling
from tests.unit.plans.played_engine import LAYERS, SPEC, WIDTH, PlayedEngine, block


@dataclasses.dataclass
class Known:
    """A dictionary: as it is stored, and its definition."""

    stored: StoredDictionary
    plain: Reference

    @property
    def taps(self) -> tuple[int, int]:
        """The taps that it reads and whose value it reconstructs."""
        at, output_at = (int(point.split(".")[1]) + 1 for point in (self.stored.at, self.stored.output_at))
        return at, output_at


def some_dictionary(seed: int, folder: Path, architecture: Architecture) -> Known:
    chance = np.random.default_rng(seed)
    normalization = list(Normalization)[seed % 4]
    if architecture.is_transcoder and normalization is Normalization.EXPECTED_AVERAGE:
        normalization = Normalization.NONE
    config = some_config(
        chance,
        architecture,
        input_width=WIDTH,
        output_width=WIDTH,
        num_features=12,
        k=3 if architecture is Architecture.TOPK else None,
        normalization=normalization,
        input_factor=0.5,
    )
    tensors = {name: one.contiguous() / 2 for name, one in some_tensors(chance, config).items()}
    path = folder / f"{architecture}-{seed}.safetensors"
    save_file(tensors, path)
    layer = int(chance.integers(LAYERS))
    output_layer = min(LAYERS - 1, layer + 1) if architecture.is_transcoder else layer
    at, output_at = f"layers.{layer}.output", f"layers.{output_layer}.output"
    stored = StoredDictionary(config, at, output_at, path.name, str(path), "float32")
    return Known(stored, Reference(Dictionary(config, tensors)))


class RandomCase:
    """A random request of a toy model on dictionaries that requests share."""

    def __init__(self, rng: random.Random, known: dict[str, Known]) -> None:
        self.known = known
        self.prompt_len = rng.randint(2, 12)
        self.tokens = [rng.randrange(50) for _ in range(self.prompt_len + rng.randint(1, 20))]
        self.embedded = weights(rng, len(self.tokens), WIDTH)
        self.raw = [self._operation(rng) for _ in range(rng.randint(1, 4))]
        for index, op in enumerate(self.raw):
            op["name"] = f"op {index}"

    def _operation(self, rng: random.Random) -> dict[str, Any]:
        kind = rng.choice(["features", "features", "feature", "feature", "flag"])
        where: dict[str, Any] = rng.choice([{}, {"phase": "generated"}, {"tokens": list(range(0, 50, 2))}])
        op: dict[str, Any] = {"op": kind, "where": where}
        if kind != "flag":
            op["dictionary"] = rng.choice(list(self.known))
        chosen = rng.sample(range(12), rng.randint(1, 4))
        if kind == "features":
            op |= {"features": chosen} if rng.random() < 0.5 else {"top_k": rng.randint(1, 12)}
        elif kind == "feature":
            op["changes"] = [self._change(rng, one) for one in chosen]
        if kind == "flag" or (kind == "feature" and rng.random() < 0.3):
            name = rng.choice(list(self.known))
            op["when"] = {"dictionary": name, "feature": rng.randrange(12)}
            if rng.random() < 0.5:
                op["when"]["above"] = rng.uniform(0, 1)
        return op

    def _change(self, rng: random.Random, feature: int) -> dict[str, Any]:
        mode = rng.choice(["set", "add", "scale", "ablate"])
        change: dict[str, Any] = {"feature": feature, "mode": mode}
        return change if mode == "ablate" else change | {"value": rng.uniform(-1, 2)}

    def resolved(self, value: Any) -> Any:
        """Return a part of an operation with its dictionaries' names resolved, as the server does."""
        if isinstance(value, dict):
            return {
                key: self.named(one) if key == "dictionary" else self.resolved(one)
                for key, one in value.items()
            }
        return [self.resolved(one) for one in value] if isinstance(value, list) else value

    def named(self, name: str) -> NamedDictionary:
        used = DictionaryUsed(name=name, version=1, id=name)
        return NamedDictionary.of(used, self.known[name].stored, None)

    def compiled(self) -> CompiledRequest | None:
        """Return the compiled request; None if a condition reads too late for the prompt."""
        try:
            return compiled([self.resolved(one) for one in self.raw], self.tokens[: self.prompt_len])
        except ApiError as error:
            if "decides for the next position" in error.message:
                return None
            raise

    def names(self, op: dict[str, Any], position: int) -> bool:
        where = op["where"]
        if "phase" in where:
            return position >= self.prompt_len
        return "tokens" not in where or self.tokens[position] in where["tokens"]


def compiled(raw: list[dict[str, Any]], prompt: list[int], spec: ModelSpec = SPEC) -> CompiledRequest:
    return compiling.compiled(*raw, spec=spec, prompt=prompt, max_tokens=32)


class Expected:
    """What a request gives, computed naively.

    Attributes:
        hidden: The hidden states after the last layer, ``[tokens, width]``.
        results: Of each operation, what it gives at each position where it acts.
    """

    def __init__(self, case: RandomCase) -> None:
        self._case = case
        self.results: list[dict[int, Any]] = [{} for _ in case.raw]
        self._before: dict[int, bool] = {}
        self.hidden = np.stack([self._position(position) for position in range(len(case.tokens))])

    def _position(self, position: int) -> Array:
        x: Array = self._case.embedded[position]
        inputs: dict[int, Array] = {}
        states: dict[int, bool] = {}
        for tap in range(LAYERS + 1):
            x = x if tap == 0 else block(tap - 1, x)
            for index, op in enumerate(self._case.raw):
                if "when" in op and self._known(op["when"]).taps[0] == tap:
                    states[index] = self._holds(op["when"], x)
                if op["op"] == "features":
                    self._read(index, op, position, tap, x)
                elif op["op"] == "feature":
                    x = self._written(index, op, position, tap, x, inputs, states)
        for index, op in enumerate(self._case.raw):
            if op["op"] == "flag" and states[index] and self._case.names(op, position):
                self.results[index][position] = True
        self._before = states
        return x

    def _known(self, op: dict[str, Any]) -> Known:
        return self._case.known[op["dictionary"]]

    def _holds(self, when: dict[str, Any], x: Array) -> bool:
        found = self._known(when).plain.encode(x.astype(np.float64))[when["feature"]]
        return bool(found > when.get("above", 0.0))

    def _read(self, index: int, op: dict[str, Any], position: int, tap: int, x: Array) -> None:
        known = self._known(op)
        if tap == known.taps[0] and self._case.names(op, position):
            self.results[index][position] = known.plain.encode(x.astype(np.float64))

    def _written(
        self,
        index: int,
        op: dict[str, Any],
        position: int,
        tap: int,
        x: Array,
        inputs: dict[int, Array],
        states: dict[int, bool],
    ) -> Array:
        known = self._known(op)
        at, output_at = known.taps
        if tap == at:
            inputs[index] = x
        if tap != output_at or not self._case.names(op, position):
            return x
        if "when" in op:
            is_next = self._known(op["when"]).taps[0] > output_at
            if not (self._before.get(index, False) if is_next else states[index]):
                return x
        self.results[index][position] = True
        return _changed(op, known, inputs[index], x)


def _changed(op: dict[str, Any], known: Known, x: Array, target: Array) -> Array:
    old = known.plain.encode(x.astype(np.float64))
    moved = target.astype(np.float64)
    for change in op["changes"]:
        a, v = old[change["feature"]], change.get("value", 0.0)
        new = {"set": v, "add": a + v, "scale": a * v, "ablate": 0.0}[change["mode"]]
        moved = moved + (new - a) * known.plain.direction(change["feature"], x.astype(np.float64))
    return moved.astype(np.float32)


@pytest.mark.parametrize("seed", range(24))
def test_features_are_those_of_a_reference(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    architectures = [list(Architecture)[seed % 8], rng.choice(list(Architecture))]
    known = {f"d{i}": some_dictionary(9 * seed + i, tmp_path, one) for i, one in enumerate(architectures)}
    cases: dict[str, RandomCase] = {}
    plans: dict[str, CompiledRequest] = {}
    while len(cases) < 4:
        case = RandomCase(rng, known)
        plan = case.compiled()
        if plan is not None:
            name = f"r{len(cases)}"
            cases[name], plans[name] = case, plan
    engine = PlayedEngine(rng)
    active = {name: engine.register(name, plan) for name, plan in plans.items()}
    hidden = engine.run(cases, active)
    for name, case in cases.items():
        assert active[name].failure is None
        expected = Expected(case)
        np.testing.assert_allclose(hidden[name], expected.hidden, rtol=1e-3, atol=1e-3)
        found = engine.collected(name, plans[name], case, [op["op"] for op in case.raw])
        results = {result.name: result for result in found.results}
        for index, op in enumerate(case.raw):
            result = results.get(op["name"])
            if op["op"] == "features" and (result is not None or expected.results[index]):
                assert isinstance(result, CollectedFeatures)
                _check_features(op, result, expected.results[index])
            elif op["op"] == "flag" and result is not None:
                assert isinstance(result, CollectedMarks)
                assert result.positions == sorted(expected.results[index])
            elif op["op"] == "feature":
                assert found.applied[index].positions == sorted(expected.results[index])
    for request in active.values():
        engine.registrar.forget(request)
    assert engine.registrar.dictionaries.num_used == 0
    assert engine.registrar.dictionaries.num_bytes > 0


def _check_features(op: dict[str, Any], result: CollectedFeatures, expected: dict[int, Array]) -> None:
    assert result.positions == sorted(expected)
    for position, row in zip(result.positions, result.rows, strict=True):
        activations = expected[position]
        if "features" in op:
            assert [feature for feature, _ in row] == op["features"]
        else:
            strongest = sorted(activations[activations > 0], reverse=True)[: op["top_k"]]
            np.testing.assert_allclose([value for _, value in row], strongest, rtol=1e-3, atol=1e-3)
        for feature, value in row:
            assert value == pytest.approx(activations[feature], rel=1e-3, abs=1e-3)


# The memory of loaded dictionaries.


def planned(known: Known) -> PlannedDictionary:
    return PlannedDictionary(known.stored.sha256, known.stored.config, known.stored.dtype)


def test_unused_dictionaries_make_room(tmp_path: Path) -> None:
    known = [some_dictionary(seed, tmp_path, Architecture.STANDARD) for seed in range(3)]
    paths = {one.stored.sha256: one.stored.path for one in known}
    size = planned(known[0]).num_bytes
    bank = DictionaryBank(torch.device("cpu"), int(2.5 * size))
    first = bank.acquire(planned(known[0]), paths)
    assert bank.acquire(planned(known[0]), paths) is first
    bank.release(planned(known[0]))
    bank.acquire(planned(known[1]), paths)
    with pytest.raises(InterventionError) as full:
        bank.acquire(planned(known[2]), paths)
    assert full.value.code == "dictionary_memory_full"
    assert bank.num_used == 2
    bank.release(planned(known[0]))
    bank.acquire(planned(known[2]), paths)
    assert bank.num_used == 2
    assert bank.num_bytes <= 2.5 * size
    assert bank.acquire(planned(known[1]), paths) is not first


def test_a_dictionary_that_cannot_be_read_is_on_no_rank(tmp_path: Path) -> None:
    known = some_dictionary(0, tmp_path, Architecture.STANDARD)
    bank = DictionaryBank(torch.device("cpu"), 1 << 20)
    with pytest.raises(InterventionError) as gone:
        bank.acquire(planned(known), {known.stored.sha256: str(tmp_path / "gone")})
    assert gone.value.code == "intervention_failed"
    assert bank.num_bytes == 0
    other = DictionaryBank(torch.device("cpu"), 1 << 20, lambda _: True)
    with pytest.raises(InterventionError, match="another rank"):
        other.acquire(planned(known), {known.stored.sha256: known.stored.path})
    assert other.num_bytes == 0


def test_selections_are_kept_as_long_as_they_are_small_and_used(tmp_path: Path) -> None:
    known = some_dictionary(0, tmp_path, Architecture.STANDARD)
    bank = DictionaryBank(torch.device("cpu"), 1 << 20)
    paths = {known.stored.sha256: known.stored.path}
    loaded = bank.acquire(planned(known), paths)
    one = loaded.selection((1, 2))
    assert loaded.selection((1, 2)) is one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dictionary_bank, "_SELECTION_BYTES", 3 * 4 * 2 * WIDTH)
        loaded.selection((3,))
        assert loaded.selection((1, 2)) is one
        loaded.selection((4,))
        loaded.selection((5,))
        assert loaded.selection((1, 2)) is not one
        assert loaded.selection((1, 2, 3, 4)) is not loaded.selection((1, 2, 3, 4))
    kept = loaded.selection((4,))
    assert loaded.selection((4,)) is kept
    bank.release(planned(known))
    bank.acquire(planned(known), paths)
    assert loaded.selection((4,)) is not kept


def test_work_is_divided_where_it_would_be_large(tmp_path: Path) -> None:
    """The same answers come from small parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_kernels, "_MAX_NUMBERS", 4 * WIDTH)
        for seed in range(4):
            folder = tmp_path / str(seed)
            folder.mkdir()
            test_features_are_those_of_a_reference(seed, folder)
    members = [((0, 1, 2), 4), ((1, 2, 3), 4), ((9, 10, 11), 30), ((0, 1, 2), 400)]
    stored = planned(some_dictionary(0, tmp_path, Architecture.STANDARD))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_kernels, "_MAX_NUMBERS", 64)
        parts = feature_kernels.bounded(
            members, lambda one: PlannedFeatures(stored, one[0]), lambda one: one[1]
        )
        assert list(map(len, parts)) == [2, 1, 1]


def test_an_infinite_feature_of_one_request_leaves_others_alone(tmp_path: Path) -> None:
    known = some_dictionary(0, tmp_path, Architecture.GATED)
    tensors = {name: torch.from_numpy(one).float() for name, one in known.plain.tensors.items()}
    tensors["r_mag"][7] = 100.0
    tensors["b_gate"][7] = 1e6
    selection = Selection(Dictionary(known.stored.config, tensors), torch.tensor([3, 7]))
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0)) + 10 * tensors["W_enc"][:, 7]
    assert selection.activations(x)[:, 1].isinf().all()
    gain, offset = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    moves = selection.moves(x, gain, offset)
    assert moves[0].isfinite().all()
    assert not moves[1].isfinite().all()


def test_a_failing_product_fails_its_own_request(tmp_path: Path) -> None:
    known = {"d": some_dictionary(0, tmp_path, Architecture.STANDARD)}
    numbers = {"good": 1, "bad": 2}
    cases = {name: RandomCase(random.Random(0), known) for name in numbers}
    engine = PlayedEngine(random.Random(1))
    active = {}
    for name, case in cases.items():
        op = {"op": "features", "dictionary": "d", "features": [numbers[name]], "name": "f"}
        plan = compiled([case.resolved(op)], case.tokens[: case.prompt_len])
        active[name] = engine.register(name, plan)
    read = feature_reads.GivenFeatures.read

    def failing(self: feature_reads.GivenFeatures) -> feature_reads.Parts:
        if any(2 in group.slices[0].active.features.ids for group in self.groups):
            raise RuntimeError("out of memory")
        return read(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_reads.GivenFeatures, "read", failing)
        engine.run(cases, active)
    assert active["good"].failure is None
    assert active["bad"].failure is not None


# Requests that are refused.


@pytest.mark.parametrize(
    ("op", "code"),
    [
        ({"op": "features", "features": [12]}, "unknown_feature"),
        ({"op": "features", "features": ["cats"]}, "unknown_feature"),
        ({"op": "feature", "changes": [{"feature": 0, "value": 1e39}]}, "not_finite"),
        ({"op": "flag", "when": {"feature": 99}}, "unknown_feature"),
    ],
)
def test_features_that_cannot_be_compiled(op: dict[str, Any], code: str, tmp_path: Path) -> None:
    known = {"d": some_dictionary(0, tmp_path, Architecture.STANDARD)}
    case = RandomCase(random.Random(0), known)
    target = op.get("when", op)
    target["dictionary"] = "d"
    with pytest.raises(ApiError) as refused:
        compiled([case.resolved(op)], [1, 2, 3])
    assert refused.value.code == code


def test_a_transcoder_that_reads_behind_its_output_is_refused(tmp_path: Path) -> None:
    known = some_dictionary(0, tmp_path, Architecture.TRANSCODER)
    stored = dataclasses.replace(known.stored, at="layers.3.output", output_at="layers.0.output")
    case = RandomCase(random.Random(0), {"d": Known(stored, known.plain)})
    change = {"op": "feature", "dictionary": "d", "changes": [{"feature": 1, "mode": "ablate"}]}
    with pytest.raises(ApiError, match=r"computed after layers\.0\.output") as refused:
        compiled([case.resolved(change)], [1, 2, 3])
    assert refused.value.param == "interventions.0.dictionary"


def test_dictionaries_that_never_fit_together_are_refused(tmp_path: Path) -> None:
    known = {f"d{seed}": some_dictionary(seed, tmp_path, Architecture.STANDARD) for seed in range(2)}
    case = RandomCase(random.Random(0), known)
    ops = [case.resolved({"op": "features", "dictionary": name}) for name in ("d0", "d0", "d1")]
    size = planned(known["d0"]).num_bytes
    spec = dataclasses.replace(SPEC, max_dictionary_bytes=size)
    compiled(ops[:2], [1, 2, 3], spec)
    with pytest.raises(ApiError, match=f"have {2 * size} bytes together") as refused:
        compiled(ops, [1, 2, 3], spec)
    assert (refused.value.code, refused.value.param) == ("tensor_too_large", "interventions.2.dictionary")


def test_a_name_without_a_server_means_nothing() -> None:
    with pytest.raises(ApiError, match="without the server"):
        compiled([{"op": "features", "dictionary": "d"}], [1, 2, 3])


def test_a_dictionary_of_another_width_is_refused(tmp_path: Path) -> None:
    known = some_dictionary(0, tmp_path, Architecture.STANDARD)
    wide = dataclasses.replace(known.stored.config, input_width=WIDTH + 1, output_width=WIDTH + 1)
    other = Known(dataclasses.replace(known.stored, config=wide), known.plain)
    case = RandomCase(random.Random(0), {"d": other})
    with pytest.raises(ApiError) as refused:
        compiled([case.resolved({"op": "features", "dictionary": "d"})], [1, 2, 3])
    assert refused.value.code == "wrong_width"


def test_conditions_over_pipeline_stages_are_refused(tmp_path: Path) -> None:
    case = RandomCase(random.Random(0), {"d": some_dictionary(0, tmp_path, Architecture.STANDARD)})
    flag = case.resolved({"op": "flag", "when": {"dictionary": "d", "feature": 1}})
    with pytest.raises(ApiError, match="one pipeline stage") as refused:
        compiled([flag], [1, 2, 3], dataclasses.replace(SPEC, num_stages=2))
    assert refused.value.param == "interventions.0.when"
