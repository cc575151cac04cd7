"""Dictionaries compute their definitions, on random numbers, and change features with the error kept."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest
import torch

from nnsight_engine.features import dictionary as module
from nnsight_engine.features.config import Architecture, Change, Normalization
from nnsight_engine.features.dictionary import Dictionary, Selection
from tests.unit.features.reference import Reference, some_config, some_tensors

NUM_TRIES: Final = 20
DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
CASES: Final = [
    (architecture, normalization)
    for architecture in Architecture
    for normalization in Normalization
    if not (architecture.is_transcoder and normalization is Normalization.EXPECTED_AVERAGE)
]


def dictionaries(
    architecture: Architecture, normalization: Normalization, seed: int = 0
) -> list[tuple[Dictionary, torch.Tensor, torch.Tensor]]:
    """Return dictionaries of random sizes, each with inputs and with values at the output."""
    chance = np.random.default_rng([seed, *map(ord, architecture + normalization)])
    found = []
    for index in range(NUM_TRIES):
        config = some_config(chance, architecture, normalization=normalization, input_factor=0.25 + index)
        made = Dictionary(config, some_tensors(chance, config, DTYPES[index % len(DTYPES)]))
        num_rows = int(chance.integers(0, 6))
        x = torch.from_numpy(chance.normal(size=(num_rows, config.input_width)) * 3).float()
        y = torch.from_numpy(chance.normal(size=(num_rows, config.output_width))).float()
        found.append((made, x, y if architecture.is_transcoder else x))
    return found


def rows(values: list[np.ndarray], width: int) -> torch.Tensor:
    return torch.from_numpy(np.array(values).reshape(-1, width)).float()


@pytest.mark.parametrize(("architecture", "normalization"), CASES)
def test_activations_and_reconstructions(architecture: Architecture, normalization: Normalization) -> None:
    for made, x, target in dictionaries(architecture, normalization):
        plain, config = Reference(made), made.config
        expected = rows([plain.encode(row) for row in x.double().numpy()], config.num_features)
        torch.testing.assert_close(made.encode(x), expected, rtol=1e-4, atol=1e-4)
        again = rows([plain.reconstruct(row) for row in x.double().numpy()], config.output_width)
        torch.testing.assert_close(made.reconstruct(x), again, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(made.error(x, target), target - made.reconstruct(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("architecture", "normalization"), CASES)
def test_some_features_alone(architecture: Architecture, normalization: Normalization) -> None:
    chance = np.random.default_rng(3)
    for made, x, _ in dictionaries(architecture, normalization, seed=1):
        num_features = made.config.num_features
        ids = torch.from_numpy(chance.permutation(num_features)[: chance.integers(1, num_features + 1)])
        torch.testing.assert_close(
            Selection(made, ids).activations(x), made.encode(x)[:, ids], rtol=1e-5, atol=1e-5
        )
        k = int(chance.integers(1, num_features + 1))
        found, activations = made.top(x, k)
        assert found.shape == activations.shape == (len(x), k)
        torch.testing.assert_close(made.encode(x).gather(1, found), activations, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            activations, made.encode(x).sort(dim=-1, descending=True).values[:, :k], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("change", Change)
@pytest.mark.parametrize(("architecture", "normalization"), CASES)
def test_a_change_moves_along_directions_and_keeps_the_error(
    architecture: Architecture, normalization: Normalization, change: Change
) -> None:
    chance = np.random.default_rng(5)
    for index, (made, x, target) in enumerate(dictionaries(architecture, normalization, seed=2)):
        plain, num_features = Reference(made), made.config.num_features
        ids = chance.permutation(num_features)[: chance.integers(1, num_features + 1)]
        shape = [(), (len(ids),), (len(x), len(ids))][index % 3]
        values = torch.from_numpy(np.asarray(chance.normal(size=shape))).float()
        given = target if architecture.is_transcoder else None
        changed = made.with_features(x, torch.from_numpy(ids), change, values, given)
        wide = values.expand(len(x), len(ids)).double().numpy()
        expected = []
        for row, value_there, new in zip(x.double().numpy(), target.double().numpy(), wide, strict=True):
            old, moved = plain.encode(row), value_there
            for feature, value in zip(ids, new, strict=True):
                now = {
                    "set": value,
                    "add": old[feature] + value,
                    "scale": old[feature] * value,
                    "ablate": 0.0,
                }
                moved = moved + (now[change] - old[feature]) * plain.direction(feature, row)
            expected.append(moved)
        torch.testing.assert_close(changed, rows(expected, made.config.output_width), rtol=1e-3, atol=1e-3)


def test_the_dtype_of_values_is_kept() -> None:
    chance = np.random.default_rng(0)
    config = some_config(chance, Architecture.STANDARD)
    made = Dictionary(config, some_tensors(chance, config, torch.bfloat16))
    x = torch.ones((3, config.input_width), dtype=torch.bfloat16)
    assert made.encode(x).dtype == torch.float32
    assert made.with_features(x, torch.tensor([0]), Change.SET, 3.0).dtype == torch.bfloat16


def test_large_inputs_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for architecture in (Architecture.STANDARD, Architecture.TOPK, Architecture.SKIP_TRANSCODER):
        for made, x, _ in dictionaries(architecture, Normalization.NONE, seed=4):
            ids = torch.arange(made.config.num_features)
            whole = (
                made.encode(x),
                made.reconstruct(x),
                made.top(x, 1)[1],
                Selection(made, ids).activations(x),
            )
            with monkeypatch.context() as patched:
                patched.setattr(module, "_PART_VALUES", 2 * made.config.num_features)
                parts = (
                    made.encode(x),
                    made.reconstruct(x),
                    made.top(x, 1)[1],
                    Selection(made, ids).activations(x),
                )
            for one, other in zip(whole, parts, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_zero_rows_have_numbers_under_every_normalization() -> None:
    for normalization in Normalization:
        for made, x, _ in dictionaries(Architecture.STANDARD, normalization):
            zeros = torch.zeros_like(x)
            assert torch.isfinite(made.encode(zeros)).all()
            assert torch.isfinite(made.reconstruct(zeros)).all()


def test_misuse_is_refused() -> None:
    chance = np.random.default_rng(0)
    config = some_config(chance, Architecture.SKIP_TRANSCODER)
    tensors = some_tensors(chance, config)
    made = Dictionary(config, tensors)
    x = torch.zeros((1, config.input_width))
    with pytest.raises(ValueError, match="give `target`"):
        made.with_features(x, torch.tensor([0]), Change.ABLATE)
    with pytest.raises(ValueError, match="give `x`"):
        made.decode(made.encode(x))
    with pytest.raises(ValueError, match="k must be from 1 to"):
        made.top(x, config.num_features + 1)
    with pytest.raises(ValueError, match="has the tensors"):
        Dictionary(config, {name: one for name, one in tensors.items() if name != "W_skip"})
