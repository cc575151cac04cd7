"""Edits in files: what is imported does what was exported, and nothing is imported that does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nnsight_engine.modeling.language import LanguageModel
from nnsight_engine.serialization import EncodeError
from tests.unit.modeling.conftest import LONG, Pair

HALF = 0.5


def scaled(value: torch.Tensor) -> torch.Tensor:
    return value * HALF


def logits_of(model: LanguageModel) -> torch.Tensor:
    with model.trace(LONG):
        logits = model.output.logits.save()
    return torch.as_tensor(logits)


def test_another_model_of_the_shape_takes_part_in_them(gpt2: Pair, tmp_path: Path) -> None:
    model = LanguageModel(gpt2.path)
    vector = torch.arange(float(model.config.hidden_size))
    factor = 2
    with model.edit() as edited:
        edited.transformer.h[0].output[:, -1] += vector * factor
    with edited.edit(inplace=True):
        model.transformer.h[1].output[:] = scaled(model.transformer.h[1].output)
    path = edited.export_edits(export_dir=tmp_path, variant="loud")
    assert path.is_relative_to(tmp_path)
    vector, factor = torch.zeros(1), 0  # they have their values of then

    other = LanguageModel(gpt2.path)
    other.import_edits(export_dir=tmp_path, variant="loud")
    assert torch.equal(logits_of(other), logits_of(edited))
    assert not torch.equal(logits_of(other), logits_of(model))
    other.clear_edits()
    assert torch.equal(logits_of(other), logits_of(model))


def test_the_cache_keeps_them_by_the_model_s_name(
    gpt2: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = LanguageModel(gpt2.path)
    with model.edit(inplace=True):
        model.transformer.h[0].output[:] = 0
    assert model.export_edits().is_relative_to(tmp_path)
    assert model.export_edits("mine/own") == tmp_path / "nnsight-engine/edits/mine--own/__default__.edits"
    assert not [*tmp_path.rglob("*.edits.*")]
    for name in (None, "mine/own"):
        other = LanguageModel(gpt2.path)
        other.import_edits(name)
        assert torch.equal(logits_of(other), logits_of(model))


def test_what_does_not_fit_is_refused(gpt2: Pair, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = LanguageModel(gpt2.path)
    with pytest.raises(ValueError, match="has no edits: make one"):
        model.export_edits(export_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"export_edits\(\) first"):
        model.import_edits(export_dir=tmp_path)
    with model.edit(inplace=True):
        model.transformer.h[0].output[:] = 0
    path = model.export_edits("any", tmp_path)
    with pytest.raises(ValueError, match="another shape"):
        LanguageModel(checkpoints["llama"]).import_edits("any", tmp_path)
    for name, variant in (("../x", "y"), ("x", "../y"), (".", "y"), ("x", "")):
        with pytest.raises(ValueError, match="choose one"):
            model.export_edits(name, tmp_path, variant)
    path.write_bytes(b"no edits")
    with pytest.raises(ValueError, match="write them again"):
        model.import_edits("any", tmp_path)


def test_what_edits_use_must_be_there(gpt2: Pair, tmp_path: Path) -> None:
    model = LanguageModel(gpt2.path)
    model.added = torch.nn.Linear(model.config.hidden_size, model.config.hidden_size)
    added = model.added
    with model.edit(inplace=True):
        model.transformer.h[0].output[:] = added(model.transformer.h[0].output)
    model.export_edits("added", tmp_path)
    with pytest.raises(ValueError, match="which this model lacks"):
        LanguageModel(gpt2.path).import_edits("added", tmp_path)

    model.clear_edits()
    with (tmp_path / "text").open("w") as file, model.edit(inplace=True):
        print(model.output, file=file)
    with pytest.raises(EncodeError, match="file"):
        model.export_edits("file", tmp_path)
