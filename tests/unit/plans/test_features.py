"""Dictionaries in the worker's memory, and operations on features that fail or are refused."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from api_schemas.dictionaries import DictionaryUsed, NamedDictionary
from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.core import model_spec
from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.features.config import Architecture
from nnsight_engine.features.dictionary import Dictionary, Selection
from nnsight_engine.plans.compile import request
from nnsight_engine.plans.request_plan import CompiledRequest, PlannedDictionary, PlannedFeatures
from nnsight_engine.plans.step import banks, feature_kernels
from nnsight_engine.plans.step.banks import DictionaryBank
from tests.unit.plans import compiling, test_conditions
from tests.unit.plans.dictionaries import Known, named_dictionary, some_dictionary
from tests.unit.plans.toy_engine import SPEC, WIDTH, Life, ToyEngine

PROMPT = [1, 2, 3]


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
        patch.setattr(banks, "_SELECTION_BYTES", 3 * 4 * 2 * WIDTH)
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
            test_conditions.test_conditions_and_features_are_those_of_a_plain_computation(seed, folder)
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


def compiled(*raw: dict[str, Any], spec: ModelSpec = SPEC) -> CompiledRequest:
    return compiling.compiled(*raw, spec=spec, prompt=PROMPT)


@pytest.fixture
def known(tmp_path: Path) -> Known:
    return some_dictionary(0, tmp_path, Architecture.STANDARD)


def test_a_failing_product_fails_its_own_request(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    read = {"op": "features", "dictionary": named_dictionary("d", known), "name": "f"}
    lives = {
        name: Life([*PROMPT], len(PROMPT), 4, compiled(read | {"features": [feature]}))
        for name, feature in (("good", 1), ("bad", 2))
    }
    read_features = feature_kernels.GivenFeatures.read

    def failing(self: feature_kernels.GivenFeatures) -> feature_kernels.Parts:
        if any(2 in group.slices[0].active.features.ids for group in self.groups):
            raise RuntimeError("out of memory")
        return read_features(self)

    monkeypatch.setattr(feature_kernels.GivenFeatures, "read", failing)
    ToyEngine(random.Random(1)).run(lives)
    failures = [life.active.failure for life in lives.values() if life.active is not None]
    assert failures[0] is None
    assert failures[1] is not None


@pytest.mark.parametrize(
    ("op", "code"),
    [
        ({"op": "features", "features": [12]}, "unknown_feature"),
        ({"op": "features", "features": ["cats"]}, "unknown_feature"),
        ({"op": "feature", "changes": [{"feature": 0, "value": 1e39}]}, "not_finite"),
        ({"op": "flag", "when": {"feature": 99}}, "unknown_feature"),
    ],
)
def test_features_that_cannot_be_compiled(op: dict[str, Any], code: str, known: Known) -> None:
    named = {"dictionary": named_dictionary("d", known)}
    with pytest.raises(ApiError) as refused:
        compiled(op | {"when": op["when"] | named} if "when" in op else op | named)
    assert refused.value.code == code


class Labels:
    """Labels of features 1 and 2, of 400 bytes."""

    async def of(self, ids: Sequence[int]) -> dict[int, str]:
        return {one: "é" * 200 for one in ids if one in {1, 2}}

    def num_bytes(self, ids: Sequence[int]) -> int:
        return 400 * len({1, 2}.intersection(ids))


@pytest.mark.parametrize(
    ("fields", "text_bytes", "is_refused"),
    [
        ({"features": [0, 1, 2]}, 10_000, True),
        ({"features": [0, 2]}, 10_000, False),
        ({"features": [1, 2], "where": {"positions": [0]}}, 10_000, False),
        ({"features": [1, 2], "where": {"phase": "generated"}}, 10_000, False),
        ({"features": [0, 1, 2]}, 6 * 3 * 60, True),
        ({"features": [0, 1, 2]}, 6 * 3 * 60 - 1, False),  # the numbers may be in a file
        ({"top_k": 12}, 10_000, False),  # all of them may be 0, and left out
    ],
)
def test_labels_beyond_the_answer_are_refused_before_anything_runs(
    fields: dict[str, Any], text_bytes: int, is_refused: bool, known: Known
) -> None:
    dictionary = NamedDictionary.of(DictionaryUsed(name="d", version=1, id="d"), known.stored, Labels())
    read = {"op": "features", "dictionary": dictionary, "name": "f", **fields}
    for max_bytes, fits in ((1999, not is_refused), (2400, True)):
        spec = dataclasses.replace(SPEC, max_capture_bytes=max_bytes)
        expected = contextlib.nullcontext() if fits else pytest.raises(ApiError, match="in 'f' the answer's")
        with expected as refused:
            compiling.compiled(read, spec=spec, prompt=PROMPT, max_text_bytes=text_bytes)
        if refused is not None:
            assert refused.value.code == "capture_too_large"


def test_a_dictionary_that_does_not_fit_the_model_is_refused(known: Known) -> None:
    def refused(op: dict[str, Any], **changes: Any) -> ApiError:
        other = Known(dataclasses.replace(known.stored, **changes), known.plain)
        with pytest.raises(ApiError) as caught:
            compiled(op | {"dictionary": named_dictionary("d", other)})
        return caught.value

    change = {"op": "feature", "changes": [{"feature": 1, "mode": "ablate"}]}
    behind = refused(change, at="layers.3.output", output_at="layers.0.output")
    assert behind.param == "interventions.0.dictionary"
    assert "computed after layers.0.output" in behind.message
    wide = dataclasses.replace(known.stored.config, input_width=WIDTH + 1, output_width=WIDTH + 1)
    assert refused({"op": "features"}, config=wide).code == "wrong_width"


def test_weights_that_a_step_would_read_are_counted_for_each_operation(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads 12 rows of 8 numbers, of a model of 3,472."""
    monkeypatch.setattr(model_spec, "_LEAST_WORK", 1)
    monkeypatch.setattr(request, "MAX_WEIGHTS", 1.0)
    named = {"dictionary": named_dictionary("d", known)}
    ops = [{"op": "features", "top_k": 1, "name": f"f{i}", **named} for i in range(37)]
    assert compiled(*ops[:36]).plan.weights == pytest.approx(36 * 12 * 8 / 3472)
    with pytest.raises(ApiError, match="1 times as many weights") as refused:
        compiled(*ops)
    assert refused.value.code is ErrorCode.TOO_MUCH_WORK


def test_dictionaries_that_never_fit_together_are_refused(tmp_path: Path, known: Known) -> None:
    other = some_dictionary(1, tmp_path, Architecture.STANDARD)
    ops = [
        {"op": "features", "dictionary": named_dictionary(f"d{id(one)}", one)}
        for one in (known, known, other)
    ]
    size = planned(known).num_bytes
    spec = dataclasses.replace(SPEC, max_dictionary_bytes=size)
    compiled(*ops[:2], spec=spec)
    with pytest.raises(ApiError, match=f"have {2 * size} bytes together") as refused:
        compiled(*ops, spec=spec)
    assert (refused.value.code, refused.value.param) == ("tensor_too_large", "interventions.2.dictionary")


def test_a_name_without_a_server_means_nothing() -> None:
    with pytest.raises(ApiError, match="without the server"):
        compiled({"op": "features", "dictionary": "d"})


def test_conditions_over_pipeline_stages_are_refused(known: Known) -> None:
    flag = {"op": "flag", "when": {"dictionary": named_dictionary("d", known), "feature": 1}}
    with pytest.raises(ApiError, match="one pipeline stage") as refused:
        compiled(flag, spec=dataclasses.replace(SPEC, num_stages=2))
    assert refused.value.param == "interventions.0.when"
