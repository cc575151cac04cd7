"""A model that embeds is served as by vLLM's own server: answers and refusals are equal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.keyed import beside_vllm
from tests.e2e.live import MODEL
from tests.e2e.test_same_as_vllm import stripped
from tests.families.checkpoints import write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

MESSAGES = [{"role": "user", "content": "The river"}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a text": ("/v1/embeddings", {"input": "The river is cold."}),
    "texts": ("/v1/embeddings", {"input": ["The river", "is", "cold"], "encoding_format": "base64"}),
    "ids": ("/v1/embeddings", {"input": [5, 6, 7]}),
    "a conversation": ("/v1/embeddings", {"messages": MESSAGES}),
    "bytes": ("/v1/embeddings", {"input": "The river", "encoding_format": "bytes"}),
    "pooling": ("/pooling", {"input": ["The river", "cold"]}),
    "scores": ("/score", {"text_1": "The river", "text_2": ["cold", "town"]}),
    "scores under /v1": ("/v1/score", {"queries": "The river", "documents": ["cold", "town"]}),
    "rerank": ("/rerank", {"query": "The river", "documents": ["cold", "town"]}),
    "rerank under /v1": ("/v1/rerank", {"query": "The river", "documents": ["cold"], "top_n": 1}),
    "rerank under /v2": ("/v2/rerank", {"query": "The river", "documents": ["cold", "town"]}),
    "classes": ("/classify", {"input": "The river"}),
    "tokens": ("/tokenize", {"prompt": "The river"}),
    "no text": ("/v1/embeddings", {"input": []}),
    "too long": ("/v1/embeddings", {"input": "sea " * 300}),
    "dimensions": ("/v1/embeddings", {"input": "The river", "dimensions": 2}),
    "a response": ("/v1/responses", {"input": "The river"}),
    "a message": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}),
}


@pytest.fixture(scope="module", autouse=True)
def strict_answers() -> None:
    """Take the forms that vLLM's own server has, and compare."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[httpx.Client]]:
    model = write_checkpoint("qwen3", tmp_path_factory.mktemp("embedding") / "qwen3")
    options = [
        "--served-model-name",
        MODEL,
        "--max-model-len",
        "256",
        "--enforce-eager",
        "--dtype",
        "float32",
    ]
    options += ["--runner", "pooling", "--convert", "embed", "--max-num-seqs", "1"]
    options += ["--pooler-config", json.dumps({"seq_pooling_type": "MEAN"})]
    with beside_vllm(model, options, tmp_path_factory.mktemp("data")) as clients:
        yield clients


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_equal(servers: list[httpx.Client], name: str) -> None:
    path, body = REQUESTS[name]
    ours, theirs = (client.post(path, json={"model": MODEL} | body) for client in servers)
    assert (ours.status_code, ours.headers["content-type"]) == (
        theirs.status_code,
        theirs.headers["content-type"],
    )
    if ours.headers["content-type"] == "application/json":
        assert stripped(ours.json()) == stripped(theirs.json())
    else:
        assert ours.content == theirs.content
