"""LoRA adapters of models that embed or classify: as transformers with the adapter merged."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from nnsight_engine.plans.collect.results import TensorResult
from tests.e2e.fuzz.nearness import as_tensor
from tests.e2e.harness import random_vector
from tests.e2e.keyed import SCOPES, made
from tests.e2e.live import MODEL, Live, live_server
from tests.families.adapters import ALPHA, RANK, write_adapter, write_merged, write_weights
from tests.families.checkpoints import HIDDEN_SIZE, build_tokenizer, write_checkpoint
from tests.families.edits import add, place
from tests.families.reference import load_reference_model, reference_activations

pytestmark = [pytest.mark.e2e, pytest.mark.heavy, pytest.mark.asyncio(loop_scope="module")]

POINT: Final = "layers.1.output"
INSIDE: Final = "layers.2.attn.q"
TEXT: Final = "The river is cold."
LONG: Final = "sea " * 40
NUM_LABELS: Final = 3
NAMES: Final = (MODEL, "first", "second")
_OPTIONS: Final = (
    *("--runner", "pooling", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"),
    *("--max-num-batched-tokens", "64", "--block-size", "32"),  # longer prompts are computed in chunks
    *("--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK)),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a tiny model, two adapters, and what they give when they are merged."""
    base = write_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))
    found = {MODEL: base}
    for seed, name in enumerate(NAMES[1:], 1):
        found[f"{name} adapter"] = write_adapter(base, tmp_path_factory.mktemp(name), seed=seed)
        found[name] = write_merged(base, found[f"{name} adapter"], tmp_path_factory.mktemp(f"{name}_merged"))
    return found


def steer() -> dict[str, Any]:
    return {"op": "steer", "at": POINT, "vector": random_vector(0, HIDDEN_SIZE), "scale": 1.0}


class Embedding:
    """A checkpoint in transformers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model: Any = load_reference_model(path)

    def of(self, text: str, *, steered: bool = False) -> torch.Tensor:
        """Return the normalized last hidden state."""
        handle = place(self.model, POINT, add(torch.tensor(steer()["vector"]))) if steered else None
        with torch.no_grad():
            ids = torch.tensor([build_tokenizer().encode(text)])
            found = self.model.model(ids, use_cache=False).last_hidden_state[0, -1]
        if handle is not None:
            handle.remove()
        return torch.nn.functional.normalize(found, dim=-1)


@pytest.fixture(scope="module")
def embeddings(folders: dict[str, Path]) -> dict[str, Embedding]:
    return {name: Embedding(folders[name]) for name in NAMES}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def operator(data: Path) -> Iterator[str]:
    """Make an operator's key, and allow that adapters are loaded at run time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NNSIGHT_ENGINE_DATA_DIR", str(data))
        key = made(patch, "operator", "--scopes", ",".join(("admin", *SCOPES)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        yield key


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedder(
    folders: dict[str, Path],
    embeddings: dict[str, Embedding],
    data: Path,
    operator: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Live]:
    options = [*_OPTIONS, "--convert", "embed", "--lora-modules", f"first={folders['first adapter']}"]
    results = tmp_path_factory.mktemp("results")
    async with live_server(folders[MODEL], results, *options, data_dir=data) as live:
        live.http.headers["authorization"] = f"Bearer {operator}"
        body = {"lora_name": "second", "lora_path": str(folders["second adapter"])}
        assert (await live.http.post("/v1/load_lora_adapter", json=body)).status_code == 200
        yield live


async def embedded(live: Live, name: str, text: str, operations: Any = (), **more: Any) -> Any:
    """Return the only item of an answer."""
    body = {"model": name, "input": text, "encoding_format": "float", **more}
    body |= {"interventions": operations} if operations else {}
    answer = await live.http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    (item,) = answer.json()["data"]
    return item


def tensor_of(sent: Any) -> torch.Tensor:
    return as_tensor(TensorResult(sent["dtype"], sent["shape"], base64.b64decode(sent["data"])))


@pytest.mark.parametrize("text", [TEXT, LONG], ids=["short", "in chunks"])
async def test_each_name_embeds_as_its_merged_weights_in_one_batch(
    embedder: Live, embeddings: dict[str, Embedding], text: str
) -> None:
    """Plain and steered, cold and with what is cached."""
    asked = [(name, steered) for name in NAMES for steered in (False, True)]
    for _ in range(2):
        found = await asyncio.gather(
            *(embedded(embedder, name, text, [steer()] if steered else []) for name, steered in asked)
        )
        for (name, steered), item in zip(asked, found, strict=True):
            wanted = embeddings[name].of(text, steered=steered)
            torch.testing.assert_close(torch.tensor(item["embedding"]), wanted, rtol=1e-4, atol=1e-5)


async def test_points_inside_adapted_layers_have_the_adapted_values(
    embedder: Live, folders: dict[str, Path]
) -> None:
    ids = build_tokenizer().encode(LONG)
    capture = {"op": "capture", "at": [INSIDE, POINT], "where": {"positions": [0, 70, -1]}, "name": "c"}
    items = await asyncio.gather(*(embedded(embedder, name, LONG, [capture]) for name in NAMES))
    for name, item in zip(NAMES, items, strict=True):
        wanted = reference_activations(folders[name], ids)
        found = item["interventions"]["results"]["c"]
        assert found["positions"] == [0, 70, len(ids) - 1]
        for point, tensor in found["points"].items():
            rows = wanted[point][[0, 70, -1]]
            torch.testing.assert_close(tensor_of(tensor), rows, rtol=1e-4, atol=1e-4)


async def test_a_preset_follows_an_adapters_name(embedder: Live, embeddings: dict[str, Embedding]) -> None:
    stored = {"name": "calm", "description": "", "interventions": [steer()]}
    assert (await embedder.http.post("/v1/presets", json=stored)).status_code == 201
    for name in NAMES:
        item = await embedded(embedder, f"{name}:calm", TEXT)
        wanted = embeddings[name].of(TEXT, steered=True)
        torch.testing.assert_close(torch.tensor(item["embedding"]), wanted, rtol=1e-4, atol=1e-5)
        pooled = await embedder.http.post("/pooling", json={"model": f"{name}:calm", "input": TEXT})
        (item,) = pooled.json()["data"]
        torch.testing.assert_close(torch.tensor(item["data"]), wanted, rtol=1e-4, atol=1e-5)


async def test_scores_and_ranks_are_those_of_the_adapter(
    embedder: Live, embeddings: dict[str, Embedding]
) -> None:
    for name in NAMES:
        one, two = (embeddings[name].of(text) for text in (TEXT, LONG))
        body = {"model": name, "text_1": TEXT, "text_2": LONG}
        answer = await embedder.http.post("/score", json=body)
        assert abs(answer.json()["data"][0]["score"] - float(one @ two)) < 1e-4


async def test_an_adapter_of_the_bare_model_that_is_loaded_and_unloaded(
    embedder: Live, folders: dict[str, Path], embeddings: dict[str, Embedding], tmp_path: Path
) -> None:
    """PEFT names the modules of a model that embeds without the prefix of one that generates."""
    weights = load_file(folders["second adapter"] / "adapter_model.safetensors")
    write_weights({name.replace("model.model.", "model.", 1): one for name, one in weights.items()}, tmp_path)
    body = {"lora_name": "bare", "lora_path": str(tmp_path)}
    assert (await embedder.http.post("/v1/load_lora_adapter", json=body)).status_code == 200
    item = await embedded(embedder, "bare", TEXT)
    wanted = embeddings["second"].of(TEXT)
    torch.testing.assert_close(torch.tensor(item["embedding"]), wanted, rtol=1e-4, atol=1e-5)
    asked: list[dict[str, Any]] = [{"model": "bare", "input": TEXT}]
    asked += [{**asked[0], "interventions": [steer()]}]
    (tmp_path / "adapter_config.json").unlink()
    for one in asked:
        gone = await embedder.http.post("/v1/embeddings", json=one)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found"), gone.text
    assert (
        await embedder.http.post("/v1/unload_lora_adapter", json={"lora_name": "bare"})
    ).status_code == 200
    for path in ("/v1/embeddings", "/pooling"):
        for one in asked:
            assert (await embedder.http.post(path, json=one)).status_code == 404
    assert (await embedded(embedder, MODEL, TEXT))["embedding"]


# A model that classifies. PEFT saves its head whole.


def write_classifier(body: Path, score: torch.Tensor, directory: Path) -> Path:
    model = AutoModelForSequenceClassification.from_pretrained(body, num_labels=NUM_LABELS, pad_token_id=0)
    model.score.weight.data = score
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(body).save_pretrained(directory)
    return directory


def with_head(head: str, number: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
    """Return the head of a model, and the weights and entries of its adapter for that; 0 is the base."""
    generator = torch.Generator().manual_seed(5)
    base = torch.randn(NUM_LABELS, HIDDEN_SIZE, generator=generator)
    config: dict[str, Any] = {"task_type": "SEQ_CLS"}
    generator.manual_seed(number)
    if number and head == "whole":
        own = torch.randn(NUM_LABELS, HIDDEN_SIZE, generator=generator)
        return own, {"base_model.model.score.weight": own}, {**config, "modules_to_save": ["score"]}
    if number and head == "low rank":
        down = torch.randn(RANK, HIDDEN_SIZE, generator=generator)
        up = torch.randn(NUM_LABELS, RANK, generator=generator)
        sides = {"A": down, "B": up}
        weights = {f"base_model.model.score.lora_{side}.weight": one for side, one in sides.items()}
        return base + ALPHA / RANK * (up @ down), weights, config
    return base, {}, config


async def classified(live: Live, name: str, operations: list[dict[str, Any]]) -> torch.Tensor:
    body = {"model": name, "input": LONG} | ({"interventions": operations} if operations else {})
    answer = await live.http.post("/classify", json=body)
    assert answer.status_code == 200, answer.text
    return torch.tensor(answer.json()["data"][0]["probs"])


@pytest.mark.parametrize("head", ["none", "low rank", "whole"])
async def test_a_classifiers_adapters_may_have_heads(
    folders: dict[str, Path], tmp_path: Path, head: str
) -> None:
    ids = torch.tensor([build_tokenizer().encode(LONG)])
    asked: list[tuple[str, list[dict[str, Any]]]] = []
    modules, wanted = [], []
    for number, name in enumerate(NAMES):
        score, own, config = with_head(head, number)
        folder = write_classifier(folders[name], score, tmp_path / name)
        if number:
            weights = load_file(folders[f"{name} adapter"] / "adapter_model.safetensors")
            write_weights(weights | own, tmp_path / f"{name}_adapter", **config)
            modules.append(f"{name}={tmp_path / f'{name}_adapter'}")
        model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            wanted.append(model(ids).logits[0].softmax(-1))
            place(model, POINT, add(torch.tensor(steer()["vector"])))
            wanted.append(model(ids).logits[0].softmax(-1))
        asked += [(name, []), (name, [steer()])]
    options = [*_OPTIONS, "--lora-modules", *modules]
    async with live_server(tmp_path / MODEL, tmp_path / "results", *options) as live:
        for _ in range(2):
            found = await asyncio.gather(*(classified(live, *one) for one in asked))
            torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=1e-4, atol=1e-5)
