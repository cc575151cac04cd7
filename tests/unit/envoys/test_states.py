"""Recurrent states as points: those of transformers' cache after each step, of each invoke's own rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nnsight_engine import LanguageModel, save
from nnsight_engine.envoys.architectures.named_points import StateError
from tests.families.checkpoints import write_checkpoint
from tests.families.reference import load_reference_model, reference_states

FAMILIES = ("falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")
PROMPT_IDS = [45, 257, 80, 301, 77, 78, 260, 90]
OTHER_IDS = [91, 120, 33, 44, 260]
NUM_TOKENS = 4


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(str(request.param), tmp_path_factory.mktemp(str(request.param)))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LanguageModel:
    return LanguageModel(str(checkpoint), dtype=torch.float32, dispatch=True)


@pytest.fixture(scope="module")
def names(model: LanguageModel) -> list[str]:
    return [name for name in model.points if name.endswith("mixer.state")]


def states_of(checkpoint: Path, ids: list[int]) -> dict[str, torch.Tensor]:
    return reference_states(load_reference_model(checkpoint), ids)


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected[None], rtol=1e-4, atol=1e-5)


def test_each_invoke_reads_the_states_of_its_own_rows(
    model: LanguageModel, names: list[str], checkpoint: Path
) -> None:
    with torch.no_grad(), model.trace() as tracer:
        first, second = save({}), save({})
        with tracer.invoke(PROMPT_IDS):
            for name in names:
                first[name] = model.points[name]
        with tracer.invoke(OTHER_IDS):  # padded
            for other in names:
                second[other] = model.points[other]
    for ids, found in ((PROMPT_IDS, first), (OTHER_IDS, second)):
        expected = states_of(checkpoint, ids)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert value.shape == model.points()[name]
            assert_equal(found[name], value)


def test_states_while_generating_are_those_after_each_token(
    model: LanguageModel, names: list[str], checkpoint: Path
) -> None:
    options = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
    with torch.no_grad(), model.generate(torch.tensor([PROMPT_IDS]), **options) as tracer:
        steps = save([])
        for _ in tracer.iter[:]:
            steps.append({name: model.points[name] for name in names})
        output = tracer.result.save()
    assert len(steps) == NUM_TOKENS
    for number, step in enumerate(steps):
        expected = states_of(checkpoint, output[0, : len(PROMPT_IDS) + number].tolist())
        for name in names:
            assert_equal(step[name], expected[name])


def test_the_output_of_a_mixer_can_be_read_before_its_state_and_after(
    model: LanguageModel, names: list[str]
) -> None:
    output = names[0].replace("state", "output")
    with torch.no_grad(), model.trace(torch.tensor([PROMPT_IDS])):
        before = model.points[output].save()
        state = model.points[names[0]].save()
        after = model.points[output].save()
    assert torch.equal(before, after)
    assert state.shape[1:] == model.points()[names[0]]


def test_states_need_a_cache_and_cannot_be_written(model: LanguageModel, names: list[str]) -> None:
    ids = torch.tensor([PROMPT_IDS])
    with pytest.raises(StateError, match="use_cache"), torch.no_grad(), model.trace(ids, use_cache=False):
        _ = model.points[names[0]]
    with pytest.raises(StateError, match="cannot be written"), torch.no_grad(), model.trace(ids):
        model.points[names[0]] = torch.zeros(1)


def test_an_edit_of_a_state_stays_in_the_block(model: LanguageModel, names: list[str]) -> None:
    ids = torch.tensor([PROMPT_IDS])
    options = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False}
    with torch.no_grad(), model.generate(ids, **options) as tracer:
        plain = save([])
        for _ in tracer.iter[:]:
            plain.append(model.points["logits"][:, -1].clone())
    with torch.no_grad(), model.generate(ids, **options) as tracer:
        edited = save([])
        for _ in tracer.iter[:]:
            model.points[names[0]][:] = 100
            edited.append(model.points["logits"][:, -1].clone())
    assert all(torch.equal(one, other) for one, other in zip(plain, edited, strict=True))
