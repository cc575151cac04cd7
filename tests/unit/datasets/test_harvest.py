"""``harvest`` on local models: values against hooks of transformers, and resuming after a kill."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import nnsight_engine
from nnsight_engine.datasets import ActivationDataset
from nnsight_engine.datasets.manifest import ManifestMismatchError, PromptsChangedError, SettingsError
from nnsight_engine.harvesting.call import UnsupportedModelError, harvest
from nnsight_engine.modeling.language import LanguageModel
from tests.families.checkpoints import write_checkpoint
from tests.unit.datasets.making import files, killed_after

pytestmark = pytest.mark.usefixtures("one_thread")

POINTS = ["layers.*.output", "layers.1.mlp.act", "layers.2.attn.heads", "embed.output"]
RANDOM = np.random.default_rng(0)
PROMPTS: list[list[int]] = [RANDOM.integers(5, 300, RANDOM.integers(1, 40)).tolist() for _ in range(40)]
SMALL: dict[str, Any] = {"pack_tokens": 100, "pack_prompts": 6, "shard_tokens": 250}


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # children are forked, which a pool of threads does not survive
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(checkpoint: Path) -> LanguageModel:
    return LanguageModel(checkpoint, dtype=torch.float32, dispatch=True)


def hooked(path: Path, prompt: list[int]) -> dict[str, torch.Tensor]:
    """Return what hooks see in transformers' model when it runs one prompt alone."""
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    seen: dict[str, torch.Tensor] = {}

    def output(name: str) -> Any:
        def hook(_: Any, __: Any, value: Any) -> None:
            seen[name] = (value[0] if isinstance(value, tuple) else value)[0]

        return hook

    def first_input(name: str) -> Any:
        def hook(_: Any, args: tuple[Any, ...]) -> None:
            seen[name] = args[0][0]

        return hook

    body = plain.model
    for number, layer in enumerate(body.layers):
        layer.register_forward_hook(output(f"layers.{number}.output"))
    body.layers[1].mlp.down_proj.register_forward_pre_hook(first_input("layers.1.mlp.act"))
    body.layers[2].self_attn.o_proj.register_forward_pre_hook(first_input("layers.2.attn.heads"))
    body.layers[0].register_forward_pre_hook(first_input("embed.output"))
    with torch.no_grad():
        plain(torch.tensor([prompt]))
    return seen


@pytest.mark.parametrize("side", ["left", "right"])
def test_values_are_those_of_hooks(checkpoint: Path, tmp_path: Path, side: str) -> None:
    model = LanguageModel(checkpoint, dtype=torch.float32, tokenizer_kwargs={"padding_side": side})
    dataset = harvest(model, PROMPTS, tmp_path, points=POINTS, **SMALL)
    assert len(dataset.shards) > 1
    columns = [dataset.index(shard.number) for shard in dataset.shards]
    index = {name: np.concatenate([one[name] for one in columns]) for name in columns[0]}
    assert index["token"].tolist() == list(itertools.chain.from_iterable(PROMPTS))
    assert set(dataset.points) == {*hooked(checkpoint, PROMPTS[0])}
    for row in np.random.default_rng(1).choice(dataset.num_rows, 12, replace=False):
        seen = hooked(checkpoint, PROMPTS[index["prompt"][row]])
        for point, values in seen.items():
            expected = values[index["position"][row]].flatten()
            torch.testing.assert_close(dataset.rows(point)[row], expected, rtol=1e-4, atol=1e-4)


def test_reductions_of_a_model(model: LanguageModel, checkpoint: Path, tmp_path: Path) -> None:
    point = "layers.1.output"
    given = PROMPTS[:5]
    last = harvest(model, given, tmp_path / "last", points=point, reduce="last")
    mean = harvest(model, given, tmp_path / "mean", points=point, reduce="mean", where={"range": [1, None]})
    assert last.num_rows == 5
    seen = [hooked(checkpoint, prompt)[point] for prompt in given]
    torch.testing.assert_close(last.rows(point)[:], torch.stack([one[-1] for one in seen]))
    means = [one[1:].mean(0) for one in seen if len(one) > 1]
    torch.testing.assert_close(mean.rows(point)[:], torch.stack(means))


def test_texts_messages_and_tokens_by_text(model: LanguageModel, tmp_path: Path) -> None:
    texts = [" the city is good", " Rome is the city"]
    dataset = harvest(model, texts, tmp_path, points="layers.0.output", where={"tokens": [" the"]})
    token = model.tokenizer(" the", add_special_tokens=False).input_ids
    assert set(dataset.index(0)["token"].tolist()) == set(token)
    assert dataset.num_rows == 2
    assert dataset.manifest.rows.where == {"tokens": token}


def test_edits_apply_and_are_in_the_manifest(model: LanguageModel, tmp_path: Path) -> None:
    plain = harvest(model, PROMPTS[:3], tmp_path / "plain", points="layers.1.output")
    with model.edit(inplace=True):
        model.points["layers.0.output"][:] = 0
    with pytest.raises(ManifestMismatchError, match=r"interventions\.fingerprint"):
        harvest(model, PROMPTS[:3], tmp_path / "plain", points="layers.1.output")
    edited = harvest(model, PROMPTS[:3], tmp_path / "edited", points=["layers.1.output", "layers.0.output"])
    assert edited.rows("layers.0.output")[:].abs().max() == 0
    assert not edited.rows("layers.1.output")[:].equal(plain.rows("layers.1.output")[:])
    assert edited.manifest.interventions.operations == [{"op": "edit"}]


def test_a_killed_harvest_resumes_to_the_same_bytes(model: LanguageModel, tmp_path: Path) -> None:
    def run(to: Path) -> ActivationDataset:
        return harvest(model, PROMPTS, to, points=POINTS, dtype="bfloat16", **SMALL)

    run(tmp_path / "whole")
    whole = files(tmp_path / "whole")
    num_killed = 0
    for number, seconds in enumerate((0.02, 0.04, 0.06, 0.08, 0.1, 0.12)):
        folder = tmp_path / f"killed-{number}"
        num_killed += killed_after(seconds, functools.partial(run, folder))
        run(folder)
        assert files(folder) == whole
    assert num_killed > 2


def test_a_finished_harvest_does_not_run_again(model: LanguageModel, tmp_path: Path) -> None:
    harvest(model, PROMPTS[:3], tmp_path, points="layers.0.output")
    before = files(tmp_path)
    harvest(model, PROMPTS[:3], tmp_path, points="layers.0.output")
    assert files(tmp_path) == before
    for others in (PROMPTS[:2], PROMPTS[:4], PROMPTS[1:4]):
        with pytest.raises(PromptsChangedError):
            harvest(model, others, tmp_path, points="layers.0.output")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"points": []}, "at least one point"),
        ({"points": "layers.9.output"}, "must lie between"),
        ({"points": "layers.0.attn.pattern"}, "no row of one width"),
        ({"points": "samples"}, "no row of one width"),
        ({"points": "logits", "reduce": "first"}, "`reduce`"),
        ({"points": "logits", "dtype": "float64"}, "`dtype`"),
        ({"points": "logits", "where": {"tokens": ["no such token"]}}, r"where\.tokens"),
        ({"points": "logits", "where": {"place": 1}}, "`where`"),
        ({"points": "logits", "interventions": [{"op": "steer"}]}, "edit"),
        ({"points": "logits", "pack_tokens": 0}, "`pack_tokens` must be at least 1"),
    ],
)
def test_settings_without_meaning_are_refused(
    model: LanguageModel, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SettingsError, match=reason):
        harvest(model, PROMPTS, tmp_path, **options)


def test_a_prompt_that_is_too_long(model: LanguageModel, tmp_path: Path) -> None:
    longest = model.config.max_position_embeddings
    long = [[5] * (longest + 1)]
    with pytest.raises(SettingsError, match=f"max_tokens={longest}"):
        harvest(model, long, tmp_path / "a", points="layers.0.output")
    assert harvest(model, long, tmp_path / "b", points="layers.0.output", max_tokens=7).num_rows == 7


def test_other_models_and_options_are_refused(model: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="LanguageModel"):
        harvest(torch.nn.Linear(2, 2), PROMPTS, tmp_path, points="logits")
    with pytest.raises(UnsupportedModelError, match="without remote="):
        harvest(LanguageModel(model.repo_id, remote=True), PROMPTS, tmp_path, points="logits")
    with pytest.raises(TypeError, match="no option speed; it has seed"):
        harvest(model, PROMPTS, tmp_path, points="logits", speed=3)  # type: ignore[call-arg]
    assert nnsight_engine.harvest is harvest
