"""Rows by number, and batches over workers that resume."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from nnsight_engine.datasets import ActivationDataset, TorchDataset, load
from nnsight_engine.datasets.manifest import IncompleteDatasetError, SettingsError
from tests.unit.datasets.making import each_position, manifest, prompts, write

POINT = "layers.0.output"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ActivationDataset:
    folder = tmp_path_factory.mktemp("dataset")
    write(folder, prompts(60), manifest())
    return load(folder)


def batches(dataset: ActivationDataset, **options: Any) -> TorchDataset:
    return dataset.torch_dataset(
        [POINT], **{"batch_size": 32, "window_rows": 160, "shuffle_seed": 1, **options}
    )


def firsts(found: Any) -> list[list[float]]:
    return [batch[POINT][:, 0].tolist() for batch in found]


def expected() -> list[float]:
    return [1000.0 * prompt + position for prompt, position, _ in each_position(prompts(60))]


def test_rows_by_number(dataset: ActivationDataset) -> None:
    rows = dataset.rows(POINT)
    assert rows[:][:, 0].tolist() == expected()
    assert rows[3:400:7][:, 0].tolist() == expected()[3:400:7]
    assert float(rows[-1][0]) == expected()[-1]
    assert rows[[500, 0, -2]][:, 0].tolist() == [expected()[500], expected()[0], expected()[-2]]
    assert rows.shard(1).data.shape[1] == 8
    with pytest.raises(IndexError, match="rows run from 0"):
        rows[len(rows)]
    with pytest.raises(SettingsError, match=r"layers\.0\.output, layers\.1\.mlp\.act"):
        dataset.rows("logits")


def test_reading_does_not_change_the_files(dataset: ActivationDataset) -> None:
    rows = dataset.rows(POINT)
    rows.shard(0).data[0] = 7
    rows[0:2][:] = 9
    assert load(dataset.path(0, "x").parents[2]).rows(POINT)[0][0] == 0


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", [None, 1])
def test_each_row_is_seen_once(dataset: ActivationDataset, num_workers: int, seed: int | None) -> None:
    given = batches(dataset, shuffle_seed=seed)
    found = firsts(DataLoader(given, batch_size=None, num_workers=num_workers))
    flat = list(itertools.chain.from_iterable(found))
    assert sorted(flat) == expected()
    if seed is None and num_workers < 2:
        assert flat == expected()
    if seed is not None:
        steps = np.abs(np.diff(np.argsort(np.argsort(flat))))
        assert np.median(steps) > 20


def test_epochs_differ_and_are_repeatable(dataset: ActivationDataset) -> None:
    given = batches(dataset)
    first, second = firsts(given), firsts(given)
    assert first != second
    again = batches(dataset)
    again.set_epoch(1)
    assert firsts(again) == second
    assert firsts(batches(dataset, shuffle_seed=2)) != first


def test_a_state_has_the_same_rest(dataset: ActivationDataset) -> None:
    whole = firsts(batches(dataset))
    for done in range(len(whole)):
        given = batches(dataset)
        iterator = iter(given)
        for _ in range(done):
            next(iterator)
        other = batches(dataset)
        other.load_state_dict(given.state_dict())
        assert firsts(other) == whole[done:]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_loader_with_workers_resumes(dataset: ActivationDataset, num_workers: int) -> None:
    whole = firsts(DataLoader(batches(dataset), batch_size=None, num_workers=num_workers))
    for done in (0, 1, 5, len(whole) - 1, len(whole)):
        given = batches(dataset)
        given.load_state_dict({"epoch": 0, "batches": done, "of_worker": False})
        rest = firsts(DataLoader(given, batch_size=None, num_workers=num_workers))
        assert sorted(map(tuple, rest)) == sorted(map(tuple, whole[done:]))


def test_the_index_comes_with_rows(dataset: ActivationDataset) -> None:
    tokens = {(prompt, position): token for prompt, position, token in each_position(prompts(60))}
    for batch in batches(dataset, with_index=True):
        named = torch.stack([batch[name] for name in ("prompt", "position", "token")], 1).tolist()
        assert [tokens[prompt, position] for prompt, position, _ in named] == [token for *_, token in named]
        assert (1000.0 * batch["prompt"] + batch["position"]).equal(batch[POINT][:, 0])


def test_what_is_no_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IncompleteDatasetError, match="no manifest"):
        load(tmp_path)
    (tmp_path / "manifest.json").write_text("{}", encoding="ascii")
    with pytest.raises(IncompleteDatasetError, match="is no manifest"):
        load(tmp_path)
