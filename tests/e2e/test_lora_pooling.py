"""LoRA adapters of models that embed or classify: as transformers with the adapter merged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.adapted import ADAPTED, BASE, FIRST, SECOND, Adapted, write_adapted
from tests.e2e.answers import tensor_of
from tests.e2e.harness import random_vector
from tests.e2e.keyed import OPERATOR, keys_in
from tests.e2e.live import MODEL, Live, live_server
from tests.e2e.test_embeddings import LONG, POINT, Reference
from tests.families.adapters import ALPHA, RANK, write_weights
from tests.families.checkpoints import HIDDEN_SIZE, build_tokenizer
from tests.families.edits import add, place
from tests.families.reference import reference_activations

pytestmark = [pytest.mark.e2e, pytest.mark.heavy, pytest.mark.asyncio(loop_scope="module")]

INSIDE: Final = "layers.2.attn.q"
TEXT: Final = "The river is cold."
NUM_LABELS: Final = 3
NAMED: Final = {MODEL: BASE, FIRST: FIRST, SECOND: SECOND}
"""What the models of the server are among those that transformers computes."""
_OPTIONS: Final = (
    *("--runner", "pooling", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"),
    *("--max-num-batched-tokens", "64", "--block-size", "32"),  # longer prompts are computed in chunks
    *ADAPTED,
)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return write_adapted("qwen3", tmp_path_factory.mktemp("adapted"))


@pytest.fixture(scope="module")
def embeddings(adapted: Adapted) -> dict[str, Reference]:
    return {name: Reference(adapted.merged[own]) for name, own in NAMED.items()}


def steer() -> dict[str, Any]:
    return {"op": "steer", "at": POINT, "vector": random_vector(0, HIDDEN_SIZE), "scale": 1.0}


def vector_if(steered: bool) -> list[float] | None:
    return steer()["vector"] if steered else None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedder(
    adapted: Adapted, embeddings: dict[str, Reference], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Live]:
    """Serve the model with the first adapter, and load the second one."""
    del embeddings  # computed before the start
    options = [*_OPTIONS, "--convert", "embed", "--lora-modules", f"first={adapted.adapters[FIRST]}"]
    results, data = tmp_path_factory.mktemp("results"), tmp_path_factory.mktemp("data")
    key = (await asyncio.to_thread(keys_in, data, operator=OPERATOR))["operator"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        async with live_server(adapted.base, results, *options, data_dir=data) as live:
            live.http.headers["authorization"] = f"Bearer {key}"
            body = {"lora_name": SECOND, "lora_path": str(adapted.adapters[SECOND])}
            assert (await live.http.post("/v1/load_lora_adapter", json=body)).status_code == 200
            yield live


async def embedded(live: Live, name: str, text: str, operations: Any = (), **more: Any) -> Any:
    body = {"model": name, "input": text, "encoding_format": "float", **more}
    body |= {"interventions": operations} if operations else {}
    answer = await live.http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    (item,) = answer.json()["data"]
    return item


@pytest.mark.parametrize("text", [TEXT, LONG], ids=["short", "in chunks"])
async def test_each_name_embeds_as_its_merged_weights_in_one_batch(
    embedder: Live, embeddings: dict[str, Reference], text: str
) -> None:
    """Plain and steered, cold and with what is cached."""
    asked = [(name, steered) for name in NAMED for steered in (False, True)]
    for _ in range(2):
        found = await asyncio.gather(
            *(embedded(embedder, name, text, [steer()] if steered else []) for name, steered in asked)
        )
        for (name, steered), item in zip(asked, found, strict=True):
            wanted = embeddings[name].embedding(text, vector_if(steered))
            torch.testing.assert_close(torch.tensor(item["embedding"]), wanted, rtol=1e-4, atol=1e-5)


async def test_points_inside_adapted_layers_have_the_adapted_values(embedder: Live, adapted: Adapted) -> None:
    ids = build_tokenizer().encode(LONG)
    capture = {"op": "capture", "at": [INSIDE, POINT], "where": {"positions": [0, 70, -1]}, "name": "c"}
    items = await asyncio.gather(*(embedded(embedder, name, LONG, [capture]) for name in NAMED))
    for own, item in zip(NAMED.values(), items, strict=True):
        wanted = reference_activations(adapted.merged[own], ids)
        found = item["interventions"]["results"]["c"]
        assert found["positions"] == [0, 70, len(ids) - 1]
        for point, tensor in found["points"].items():
            rows = wanted[point][[0, 70, -1]]
            torch.testing.assert_close(torch.tensor(tensor_of(tensor)), rows, rtol=1e-4, atol=1e-4)


async def test_a_preset_follows_an_adapters_name(embedder: Live, embeddings: dict[str, Reference]) -> None:
    stored = {"name": "calm", "description": "", "interventions": [steer()]}
    assert (await embedder.http.post("/v1/presets", json=stored)).status_code == 201
    for name in NAMED:
        item = await embedded(embedder, f"{name}:calm", TEXT)
        wanted = embeddings[name].embedding(TEXT, steer()["vector"])
        torch.testing.assert_close(torch.tensor(item["embedding"]), wanted, rtol=1e-4, atol=1e-5)
        pooled = await embedder.http.post("/pooling", json={"model": f"{name}:calm", "input": TEXT})
        (item,) = pooled.json()["data"]
        torch.testing.assert_close(torch.tensor(item["data"]), wanted, rtol=1e-4, atol=1e-5)


async def test_scores_and_ranks_are_those_of_the_adapter(
    embedder: Live, embeddings: dict[str, Reference]
) -> None:
    for name in NAMED:
        one, two = (embeddings[name].embedding(text) for text in (TEXT, LONG))
        body = {"model": name, "text_1": TEXT, "text_2": LONG}
        answer = await embedder.http.post("/score", json=body)
        assert abs(answer.json()["data"][0]["score"] - float(one @ two)) < 1e-4


async def test_an_adapter_of_the_bare_model_that_is_loaded_and_unloaded(
    embedder: Live, adapted: Adapted, embeddings: dict[str, Reference], tmp_path: Path
) -> None:
    """PEFT names the modules of a model that embeds without the prefix of one that generates."""
    weights = load_file(adapted.adapters[SECOND] / "adapter_model.safetensors")
    write_weights({name.replace("model.model.", "model.", 1): one for name, one in weights.items()}, tmp_path)
    body = {"lora_name": "bare", "lora_path": str(tmp_path)}
    assert (await embedder.http.post("/v1/load_lora_adapter", json=body)).status_code == 200
    item = await embedded(embedder, "bare", TEXT)
    wanted = embeddings[SECOND].embedding(TEXT)
    torch.testing.assert_close(torch.tensor(item["embedding"]), wanted, rtol=1e-4, atol=1e-5)
    asked: list[dict[str, Any]] = [{"model": "bare", "input": TEXT}]
    asked += [{**asked[0], "interventions": [steer()]}]
    (tmp_path / "adapter_config.json").unlink()  # it was read when it was loaded
    again = await embedded(embedder, "bare", TEXT)
    torch.testing.assert_close(torch.tensor(again["embedding"]), wanted, rtol=1e-4, atol=1e-5)
    steered = await embedded(embedder, "bare", TEXT, [steer()])
    assert steered["embedding"] != item["embedding"]
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
async def test_a_classifiers_adapters_may_have_heads(adapted: Adapted, tmp_path: Path, head: str) -> None:
    ids = torch.tensor([build_tokenizer().encode(LONG)])
    asked: list[tuple[str, list[dict[str, Any]]]] = []
    modules, wanted = [], []
    for number, name in enumerate(NAMED):
        score, own, config = with_head(head, number)
        folder = write_classifier(adapted.merged[NAMED[name]], score, tmp_path / name)
        if number:
            weights = load_file(adapted.adapters[name] / "adapter_model.safetensors")
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
