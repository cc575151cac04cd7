"""A model that is served to embed: embeddings, plain and steered, and captures are those of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI

from nnsight_engine.vllm_backend.async_engine import PauseRefusedError
from tests.e2e.answers import tensor_of
from tests.e2e.harness import random_vector
from tests.e2e.live import MODEL, Live, live_server
from tests.families.checkpoints import build_tokenizer, write_checkpoint
from tests.families.edits import add, place
from tests.families.reference import load_reference_model, reference_activations

pytestmark = [pytest.mark.e2e, pytest.mark.heavy, pytest.mark.asyncio(loop_scope="module")]

TEXTS = ["The river is cold.", "A quiet town by the sea, where nobody has ever been", "One"]
POINT = "layers.1.output"
LONG = "sea " * 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen3", tmp_path_factory.mktemp("embedding") / "qwen3")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param([], id="one worker"),
        pytest.param(["--pipeline-parallel-size", "2"], id="two stages"),
    ],
)
def workers(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    chosen: list[str] = request.param
    with pytest.MonkeyPatch.context() as patch:
        if chosen:
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            patch.setenv("OMP_NUM_THREADS", "1")
        yield chosen


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(
    workers: list[str], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Live]:
    # Prompts longer than a step are computed in chunks.
    options = [*workers, "--runner", "pooling", "--convert", "embed", "--dtype", "float32", "--enforce-eager"]
    options += ["--max-model-len", "256", "--max-num-batched-tokens", "64", "--block-size", "32"]
    async with live_server(checkpoint, tmp_path_factory.mktemp("results"), *options) as live:
        yield live


async def test_a_paused_engine_answers_later_and_none_is_asked_to_abort(live: Live) -> None:
    engine = live.engine.engine
    body = {"model": MODEL, "input": TEXTS}
    expected = (await live.http.post("/v1/embeddings", json=body)).json()["data"]
    for pause in (engine.sleep(0, "abort"), engine.pause_generation(mode="abort")):
        with pytest.raises(PauseRefusedError, match="mode=wait"):
            await pause
    assert not await engine.is_sleeping()
    await engine.sleep(0, "wait")
    waiting = asyncio.create_task(live.http.post("/v1/embeddings", json=body))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await engine.wake_up()
    assert (await waiting).json()["data"] == expected


class Reference:
    def __init__(self, path: Path) -> None:
        self.model: Any = load_reference_model(path)
        config: Any = self.model.config
        self.hidden_size: int = config.hidden_size

    def embedding(self, text: str, vector: list[float] | None = None) -> torch.Tensor:
        """Return the normalized last hidden state, with a vector added at ``POINT`` if one is given."""
        ids = torch.tensor([build_tokenizer().encode(text)])
        handle = None if vector is None else place(self.model, POINT, add(torch.tensor(vector)))
        with torch.no_grad():
            found = self.model.model(ids, use_cache=False).last_hidden_state[0, -1]
        if handle is not None:
            handle.remove()
        return torch.nn.functional.normalize(found, dim=-1)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


def steer(reference: Reference, seed: int = 0) -> dict[str, Any]:
    return {"op": "steer", "at": POINT, "vector": random_vector(seed, reference.hidden_size), "scale": 1.0}


async def embed(live: Live, texts: Any, operations: Any = (), path: str = "/v1/embeddings") -> list[Any]:
    body = {"model": MODEL, "input": texts, "encoding_format": "float"}
    answer = await live.http.post(path, json=body | ({"interventions": operations} if operations else {}))
    assert answer.status_code == 200, answer.text
    return list(answer.json()["data"])


def close(found: Any, expected: torch.Tensor) -> bool:
    return bool(torch.allclose(torch.tensor(found), expected, atol=1e-5))


async def test_plain_and_steered_texts_of_one_batch(live: Live, reference: Reference) -> None:
    """Each text has its own operations, neighbours have none, and the cache keeps them apart."""
    one, two = steer(reference), steer(reference, 1)
    for _ in range(2):
        plain, steered = await asyncio.gather(
            embed(live, TEXTS), embed(live, TEXTS, [one | {"prompts": [1]}, two | {"prompts": [2]}])
        )
        vectors = [None, one["vector"], two["vector"]]
        for text, vector, found, without in zip(TEXTS, vectors, steered, plain, strict=True):
            assert close(found["embedding"], reference.embedding(text, vector))
            assert close(without["embedding"], reference.embedding(text))
            assert "interventions" not in without
        assert set(steered[1]["interventions"]["applied"][0]) >= {"op"}
    for held in await live.engine.engine.collective_rpc("count_interventions"):
        assert set(held.values()) == {0}


async def test_captures_over_chunks(live: Live, checkpoint: Path) -> None:
    capture = {"op": "capture", "at": [POINT, "norm.output"], "dtype": "float32", "name": "c"}
    ids = build_tokenizer().encode(LONG)
    assert len(ids) > 64
    expected = reference_activations(checkpoint, ids)
    for path in ("/v1/embeddings", "/pooling"):
        (item,) = await embed(live, LONG, [capture | {"where": {"positions": [0, 70, -1]}}], path)
        result = item["interventions"]["results"]["c"]
        assert result["positions"] == [0, 70, len(ids) - 1]
        for point, tensor in result["points"].items():
            assert torch.allclose(torch.tensor(tensor_of(tensor)), expected[point][[0, 70, -1]], atol=1e-4)


async def test_operations_that_need_tokens_are_refused(live: Live) -> None:
    refused = {
        "logits": ({"op": "capture", "at": "logits"}, "unknown_point"),
        "lens": ({"op": "logit_lens", "layers": "all"}, "unsupported_at_point"),
        "generated": ({"op": "capture", "at": POINT, "where": {"phase": "generated"}}, "contradictory_where"),
        "code": ({"op": "trace", "code": "pass"}, "unsupported_combination"),
    }
    for operation, code in refused.values():
        body = {"model": MODEL, "input": "x", "interventions": [operation]}
        answer = await live.http.post("/v1/embeddings", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code), answer.text
    operations = [{"op": "capture", "at": POINT}]
    binary = {"model": MODEL, "input": "x", "encoding_format": "bytes", "interventions": operations}
    answer = await live.http.post("/v1/embeddings", json=binary)
    assert answer.json()["error"]["code"] == "unsupported_combination"
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = await live.post(path, prompt="x", messages=[{"role": "user", "content": "x"}])
        assert answer.status_code == 400
        assert "generates no text" in answer.json()["error"]["message"]


async def test_a_write_that_fails_fails_its_text_alone(live: Live, reference: Reference) -> None:
    huge = {"op": "steer", "at": POINT, "vector": [3e38] * reference.hidden_size, "scale": 10.0}
    body = {"model": MODEL, "input": TEXTS, "interventions": [huge | {"prompts": [0]}]}
    failed, plain = await asyncio.gather(live.http.post("/v1/embeddings", json=body), embed(live, TEXTS))
    assert failed.status_code == 400, failed.text
    assert close(plain[0]["embedding"], reference.embedding(TEXTS[0]))


async def test_scores_and_the_official_client(live: Live, reference: Reference) -> None:
    one, two = (reference.embedding(text) for text in TEXTS[:2])
    body = {"model": MODEL, "text_1": TEXTS[0], "text_2": TEXTS[1]}
    answer = (await live.http.post("/v1/score", json=body)).json()
    assert abs(answer["data"][0]["score"] - float(one @ two)) < 1e-4
    refused = await live.http.post("/v1/score", json=body | {"interventions": [steer(reference)]})
    assert refused.status_code == 400
    order = {"model": MODEL, "query": TEXTS[0], "documents": TEXTS[1:]}
    ranked = (await live.http.post("/rerank", json=order)).json()["results"]
    assert {item["index"] for item in ranked} == {0, 1}
    client = AsyncOpenAI(base_url=f"{live.http.base_url}/v1", api_key="unused")
    operation = steer(reference)
    found = await client.embeddings.create(
        model=MODEL, input=TEXTS[0], extra_body={"interventions": [operation]}
    )
    assert close(found.data[0].embedding, reference.embedding(TEXTS[0], operation["vector"]))
