"""``harvest`` with vLLM: a local model's rows, the same bytes whatever else the engine does, resumable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from nnsight_engine import LanguageModel, harvest
from nnsight_engine.datasets import ActivationDataset
from nnsight_engine.datasets.manifest import PromptsChangedError, SettingsError, SinkError
from nnsight_engine.datasets.storage import Retries
from nnsight_engine.harvesting import vllm as driver
from nnsight_engine.vllm_backend.engines import SyncEngine
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.families.checkpoints import write_checkpoint
from tests.unit.datasets.making import files

POINTS: Final = ["layers.1.output", "layers.2.attn.output", "layers.2.mlp.act"]
SMALL: Final[dict[str, Any]] = {"pack_tokens": 64, "pack_prompts": 5, "shard_tokens": 300}
ENGINE: Final[dict[str, Any]] = {
    "dtype": "float32", "max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 16,
}  # fmt: skip
_RANDOM = np.random.default_rng(0)
PROMPTS: Final[list[list[int]]] = [
    _RANDOM.integers(5, 300, length).tolist() for length in [*_RANDOM.integers(1, 40, 40), 150, 64, 65]
]
"""The last ones fill a step, or are computed in several."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Iterator[VLLM]:
    made = VLLM(str(checkpoint), dispatch=True, **ENGINE)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def local(checkpoint: Path) -> LanguageModel:
    return LanguageModel(checkpoint, dtype=torch.float32, dispatch=True)


def rows_of(dataset: ActivationDataset) -> dict[str, torch.Tensor]:
    return {point: dataset.rows(point)[:] for point in (one.name for one in dataset.manifest.rows.points)}


@pytest.mark.parametrize("reduce", ["all", "last", "mean", "every:3", "random:2"])
@pytest.mark.parametrize("where", [{}, {"range": [2, -1]}, {"tokens": list(range(5, 120))}])
def test_rows_are_those_of_a_local_model(
    model: VLLM, local: LanguageModel, tmp_path: Path, reduce: str, where: dict[str, Any]
) -> None:
    """Also of prompts without a row, as ``where`` leaves some of them."""
    options: dict[str, Any] = {"points": POINTS, "reduce": reduce, "where": where, **SMALL}
    ours = harvest(model, PROMPTS, tmp_path / "vllm", **options)
    expected = harvest(local, PROMPTS, tmp_path / "local", **options)
    assert ours.manifest.num_rows == expected.manifest.num_rows > 0
    assert ours.manifest.num_prompts == len(PROMPTS)
    theirs = rows_of(expected)
    for point, rows in rows_of(ours).items():
        torch.testing.assert_close(rows, theirs[point], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_narrow_rows_are_rounded_float32_ones(model: VLLM, tmp_path: Path, dtype: Any) -> None:
    exact = rows_of(harvest(model, PROMPTS, tmp_path / "exact", points=POINTS, **SMALL))
    narrow = rows_of(harvest(model, PROMPTS, tmp_path / "narrow", points=POINTS, dtype=dtype, **SMALL))
    for point, rows in exact.items():
        step = rows.abs().amax(1, keepdim=True) / 127 if dtype == "int8" else rows.abs() / 128
        assert ((narrow[point].float() - rows).abs() <= step * 0.51 + 1e-12).all()


def test_operations_apply_to_all_prompts(model: VLLM, tmp_path: Path) -> None:
    plain = rows_of(harvest(model, PROMPTS, tmp_path / "plain", points=POINTS, **SMALL))
    width = plain[POINTS[0]].shape[1]
    steer = {"op": "steer", "at": POINTS[0], "vector": [0.5] * width, "scale": 2.0}
    steered = harvest(model, PROMPTS, tmp_path / "s", points=POINTS, interventions=[steer], **SMALL)
    assert steered.manifest.interventions.fingerprint
    changed = rows_of(steered)[POINTS[0]] - plain[POINTS[0]]
    torch.testing.assert_close(changed, torch.ones_like(changed), atol=1e-5, rtol=1e-5)


def test_operations_are_left_out_where_a_prompt_lacks_their_positions(model: VLLM, tmp_path: Path) -> None:
    options: dict[str, Any] = {"points": POINTS[:1], **SMALL}
    plain = harvest(model, PROMPTS, tmp_path / "plain", **options)
    ones = [1.0] * plain.manifest.rows.points[0].width
    steer = {"op": "steer", "at": POINTS[0], "vector": ones, "where": {"positions": [30]}}
    steered = harvest(model, PROMPTS, tmp_path / "steered", interventions=[steer], **options)
    change = (rows_of(steered)[POINTS[0]] - rows_of(plain)[POINTS[0]]).round(decimals=4)
    positions = np.concatenate([plain.index(shard.number)["position"] for shard in plain.manifest.shards])
    assert (change[torch.from_numpy(positions == 30)] == 1).all()
    assert (change[torch.from_numpy(positions < 30)] == 0).all()
    assert any(positions == 30)
    assert any(len(prompt) <= 30 for prompt in PROMPTS)


def test_keys_and_values_of_steered_prompts_serve_nobody_else(model: VLLM, tmp_path: Path) -> None:
    prompt = {"prompt_token_ids": PROMPTS[-1]}

    def answer() -> list[int]:
        params = SamplingParams(max_tokens=8, temperature=0.0)
        return list(model.host.run([prompt], [params])[0].outputs[0].token_ids)  # type: ignore[union-attr]

    before = answer()
    model.engine.reset_prefix_cache()
    steer = {"op": "steer", "at": "layers.0.output", "vector": [50.0] * 128}
    harvest(model, PROMPTS, tmp_path / "s", points=POINTS, interventions=[steer], **SMALL)
    assert answer() == before


def test_a_finished_dataset_is_of_its_prompts(model: VLLM, tmp_path: Path) -> None:
    options: dict[str, Any] = {"points": POINTS, **SMALL}
    made = harvest(model, PROMPTS, tmp_path / "d", **options)
    assert harvest(model, PROMPTS, tmp_path / "d", **options).manifest == made.manifest
    for others in (PROMPTS[:-1], [*PROMPTS, [5]], [[6], *PROMPTS[1:]]):
        with pytest.raises(PromptsChangedError):
            harvest(model, others, tmp_path / "d", **options)


def test_a_place_that_refuses_is_named_and_the_engine_goes_on(model: VLLM, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(SinkError, match="file"):
        harvest(model, PROMPTS, tmp_path / "file" / "d", points=POINTS, **SMALL)
    harvest(model, PROMPTS, tmp_path / "d", points=POINTS, **SMALL)


@pytest.mark.heavy  # a second engine
def test_an_engine_in_a_process_of_its_own_writes_the_same_bytes(
    model: VLLM, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harvest(model, PROMPTS, tmp_path / "here", points=POINTS, **SMALL)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.chdir(tmp_path)
    apart = VLLM(str(checkpoint), **ENGINE)
    try:
        harvest(apart, PROMPTS, "there", points=POINTS, retries=Retries(), spool=tmp_path, **SMALL)
        with pytest.raises(PromptsChangedError):
            harvest(apart, PROMPTS[1:], "there", points=POINTS, **SMALL)
        (tmp_path / "file").write_text("no folder")
        with pytest.raises(SinkError):
            harvest(apart, PROMPTS, "file/there", points=POINTS, **SMALL)
    finally:
        apart.shutdown()
    assert files(tmp_path / "there") == files(tmp_path / "here")


class _Busy(SyncEngine):
    """The engine beside other people's requests, which come before, between and after those of packs."""

    def __init__(self, engine: SyncEngine) -> None:
        self.__dict__.update(engine.__dict__)

    def run(self, prompts: Sequence[Any], params: Sequence[Any], adapters: Any = None) -> list[Any]:
        del adapters
        mixed: list[tuple[Any, Any, bool]] = []
        for count, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            if count % 3 == 0:
                other = SamplingParams(max_tokens=1 + count % 7, temperature=0.0)
                mixed.append(({"prompt_token_ids": PROMPTS[count % 30]}, other, False))
            mixed.append((prompt, own, True))
        outputs = super().run([one[0] for one in mixed], [one[1] for one in mixed])
        assert all(output.finished for output in outputs)
        return [output for output, (*_, is_own) in zip(outputs, mixed, strict=True) if is_own]


def test_bytes_do_not_depend_on_other_requests(
    model: VLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = tmp_path / "alone"
    harvest(model, PROMPTS, alone, points=POINTS, **SMALL)
    monkeypatch.setitem(model.__dict__, "host", _Busy(model.__dict__["host"]))
    beside = tmp_path / "beside"
    harvest(model, PROMPTS, beside, points=POINTS, **SMALL)
    assert files(beside) == files(alone)


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_a_run_that_was_interrupted_goes_on_and_ends_with_the_same_bytes(
    model: VLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    whole = tmp_path / "whole"
    harvest(model, PROMPTS, whole, points=POINTS, **SMALL)
    monkeypatch.setattr(driver, "_PACKS_AT_ONCE", 2)
    run, calls = SyncEngine.run, 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt
        return run(*args, **kwargs)

    folder = tmp_path / "resumed"
    with monkeypatch.context() as patched:
        patched.setattr(SyncEngine, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            harvest(model, PROMPTS, folder, points=POINTS, **SMALL)
    resumed = harvest(model, PROMPTS, folder, points=POINTS, **SMALL)
    assert resumed.manifest.state == "complete"
    assert files(folder) == files(whole)


def test_what_has_no_place_is_refused(model: VLLM, tmp_path: Path) -> None:
    def refused(match: str, **options: Any) -> None:
        with pytest.raises(SettingsError, match=match):
            harvest(model, PROMPTS, tmp_path / "no", **{"points": POINTS, **options})
        assert not (tmp_path / "no").exists()

    refused("got 9", points=["layers.9.output"])
    refused("attn.pattern", points=["layers.1.attn.pattern"])
    refused("at most 64", pack_tokens=65)
    refused("that write", interventions=[{"op": "capture", "at": POINTS[0]}])
    refused("slow or drop", policy="fast")
    refused("a trace is code", interventions=[{"op": "trace", "code": "x = 1"}])
    with pytest.raises(SettingsError, match="256"):
        harvest(model, [[5] * 256], tmp_path / "long", points=POINTS)
