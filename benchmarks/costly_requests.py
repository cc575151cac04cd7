"""Requests that cost a server much, each allowed by every limit, and a client of another tenant."""

from __future__ import annotations

import base64
import json
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import httpx
import numpy as np
import safetensors.numpy

from benchmarks.process import ChildObject
from benchmarks.servers import MODEL_NAME

WIDTH: Final = 576
"""The width of the bundled model."""

_NUM_LAYERS: Final = 30
_NUM_FEATURES: Final = 60_000
_HIDDEN: Final = 4096
_PARTS: Final = range(9, 16)
"""Layers at which a detector has a part; it has 64 MiB."""
_LIMIT_S: Final = 15
"""How long a costly request is waited for; its client then closes the connection."""
_PIXEL: Final = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Waits(NamedTuple):
    """The longest waits of a client, in seconds."""

    first_token: float
    gap: float
    models: float


class PlainClient:
    """A client that streams short completions, one after another, and lists the models all the time."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._headers = url, {"Authorization": f"Bearer {key}"}
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._first: list[float] = []
        self._gaps: list[float] = []
        self._models: list[float] = []

    def start(self) -> None:
        """Begin."""
        self._is_over.clear()
        for times in (self._first, self._gaps, self._models):
            times.clear()
        self._threads = [threading.Thread(target=one) for one in (self._stream, self._list)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> Waits:
        """End, and return the longest waits since the start."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        return Waits(max(self._first), max(self._gaps), max(self._models))

    def _stream(self) -> None:
        body = {"model": MODEL_NAME, "prompt": "Once", "max_tokens": 32, "stream": True, "ignore_eos": True}
        with self._client() as client:
            while not self._is_over.is_set():
                last, times = time.perf_counter(), self._first
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            times.append(time.perf_counter() - last)
                            last, times = time.perf_counter(), self._gaps

    def _list(self) -> None:
        with self._client() as client:
            while not self._is_over.wait(0.02):
                start = time.perf_counter()
                client.get("/v1/models").raise_for_status()
                self._models.append(time.perf_counter() - start)

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self._url, headers=self._headers, timeout=600)


class CostlyClient:
    """The client with costly requests; it stores what they name.

    Args:
        url: The server.
        key: Its key, of another tenant than the plain client's.
    """

    def __init__(self, url: str, key: str) -> None:
        self._client = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=_LIMIT_S
        )
        self._prompt = np.random.default_rng(0).integers(1000, 40_000, 4000).tolist()
        self._dictionary = ""
        self._detectors: list[str] = []
        self._is_bare = False
        self._chance = np.random.default_rng(0)

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def store(self) -> None:
        """Store a dictionary with labels, and detectors."""
        chance = np.random.default_rng(0)
        shapes = {"W_enc": (WIDTH, _NUM_FEATURES), "b_enc": (_NUM_FEATURES,)}
        shapes |= {"W_dec": (_NUM_FEATURES, WIDTH), "b_dec": (WIDTH,)}
        numbers = {name: chance.normal(size=shape, scale=0.02) for name, shape in shapes.items()}
        weights = safetensors.numpy.save({name: one.astype(np.float16) for name, one in numbers.items()})
        metadata = {"hook_name": "blocks.12.hook_resid_post"}
        cfg = {"architecture": "topk", "k": 64, "d_in": WIDTH, "d_sae": _NUM_FEATURES, "metadata": metadata}
        words = ["river", "city", "money", "green", "winter", "music", "engine", "doubt"]
        labels = {str(i): " ".join(chance.choice(words, 8)) for i in range(_NUM_FEATURES)}
        form = {"name": "large", "cfg": json.dumps(cfg), "labels": json.dumps(labels)}
        made = self._client.post("/v1/dictionaries", data=form, files={"weights": ("w", weights)})
        self._dictionary = _json(made)["id"]
        for index in range(2):
            ones = np.ones(_HIDDEN, np.float32)
            tensors: dict[str, Any] = {}
            for part in range(len(_PARTS)):
                hidden = chance.normal(size=(_HIDDEN, WIDTH), scale=0.02).astype(np.float32)
                own = {"hidden_weights": hidden, "hidden_bias": ones, "weights": ones}
                tensors |= {f"parts.{part}.{name}": one for name, one in own.items()}
            head = {"parts": [{"at": f"layers.{layer}.output", "form": "mlp"} for layer in _PARTS]}
            file = safetensors.numpy.save(tensors, {"detector": json.dumps(head)})
            form = {"name": f"large{index}"}
            made = self._client.post("/v1/detectors", data=form, files={"file": ("d", file)})
            self._detectors.append(_json(made)["name"])

    def send(self, name: str, number: int, *, is_bare: bool = False) -> str:
        """Send a costly request so many times at once, and return how they ended.

        Args:
            name: The request.
            number: How many times it is sent.
            is_bare: Whether it is sent without its operations.
        """
        self._is_bare = is_bare
        with ThreadPoolExecutor(number) as threads:
            return ", ".join(sorted({*threads.map(lambda _: self._sent(name), range(number))}))

    def _sent(self, name: str) -> str:
        try:
            ended: str = getattr(self, f"_{name}")()
        except httpx.ReadTimeout:
            return f"closed after {_LIMIT_S} s"
        return ended

    def _complete(self, num_tokens: int, *operations: dict[str, Any], **fields: Any) -> str:
        body = {"model": MODEL_NAME, "prompt": self._prompt[:num_tokens], "max_tokens": 1, **fields}
        if self._is_bare:  # what reads a prompt computes it, so this one does too
            body["cache_salt"] = uuid.uuid4().hex
        else:
            body["interventions"] = [*operations]
        answer = self._client.post("/v1/completions", json=body)
        if answer.status_code == httpx.codes.OK:
            return "200"
        return f"{answer.status_code} {answer.json()['error']['code']}"

    def _lens(self) -> str:
        return self._complete(512, {"op": "logit_lens", "layers": "all", "top_k": 100})

    def _probes(self) -> str:
        probe = {"op": "probe", "at": "layers.*.output", "weights": [0.1] * WIDTH}
        return self._complete(2000, *({**probe, "name": f"p{i}"} for i in range(64)))

    def _choices(self) -> str:
        where = {"phase": "generated"}
        capture = {"op": "capture", "at": "layers.*.output", "where": where}
        return self._complete(8, capture, n=1024, max_tokens=2, temperature=1.0)

    def _features(self) -> str:
        changes = [{"feature": i, "mode": "add", "value": 0.01} for i in range(64)]
        operation = {"op": "feature", "dictionary": {"name": "large", "id": self._dictionary}}
        return self._complete(2000, *({**operation, "changes": changes} for _ in range(26)))

    def _top_features(self) -> str:
        operation = {"op": "features", "dictionary": {"name": "large", "id": self._dictionary}, "top_k": 100}
        return self._complete(2000, *({**operation, "name": f"f{i}"} for i in range(16)))

    def _detections(self) -> str:
        names = [self._detectors[i % len(self._detectors)] for i in range(56)]
        return self._complete(
            2000, *({"op": "detect", "detector": one, "name": f"d{i}"} for i, one in enumerate(names))
        )

    def _endless(self) -> str:
        code = "x = model.layers[5].output\nwhile True:\n    x[:] = x"
        return self._complete(8, {"op": "trace", "name": "endless", "code": code})

    def _edges(self) -> str:
        """Send pairs of operations, each with its fields at their limits."""
        every = {"at": "layers.*.output"}
        ones = [0.1] * WIDTH
        dictionary = {"dictionary": {"name": "large", "id": self._dictionary}}
        test = {"detector": self._detectors[0], "above": 0.0, "over": "prompt"}
        operations: list[dict[str, Any]] = [
            {"op": "capture", **every},
            {"op": "capture", "at": "layers.*.attn.pattern"},
            {"op": "logit_lens", "layers": "all", "top_k": 100},
            {"op": "logit_lens", "layers": "all", "targets": list(range(100))},
            {"op": "probe", **every, "weights": ones},
            {"op": "detect", "detector": self._detectors[0]},
            {"op": "features", **dictionary, "top_k": 100},
            {"op": "steer", **every, "vector": ones, "when": test},
            {"op": "ablate", **every, "method": "mean"},
            {"op": "flag", "when": test},
        ]
        fields: list[dict[str, Any]] = [
            {},
            {"logprobs": 20},
            {"n": 128, "temperature": 1.0},
            {"max_tokens": 256},
        ]
        pair = self._chance.choice(len(operations), 2, replace=False)
        return self._complete(
            int(self._chance.choice([64, 512, 2000, 4000])),
            *({**operations[index], "name": f"o{index}"} for index in pair),
            **fields[self._chance.integers(len(fields))],
        )

    def _stored(self) -> str:
        if self._is_bare:
            return ""
        image = {"type": "input_image", "image_url": f"data:image/png;base64,{_PIXEL}{' ' * 2**23}"}
        text = {"type": "input_text", "text": base64.b64encode(bytes(2**12)).decode()}
        content = [{"role": "user", "content": [text, image]}]
        body = {"model": MODEL_NAME, "input": content, "max_output_tokens": 4, "background": True}
        codes = {self._client.post("/v1/responses", json=body).status_code for _ in range(10)}
        return ", ".join(map(str, sorted(codes)))

    def _search(self) -> str:
        query = "r c m g w m e d ri ci mo gr wi mu en do"
        path = f"/v1/dictionaries/{self._dictionary}/features"

        if self._is_bare:
            return ""

        def search(_: int) -> int:
            return self._client.get(path, params={"query": query}).status_code

        with ThreadPoolExecutor(15) as threads:
            codes = {*threads.map(search, range(15))}
        return ", ".join(map(str, sorted(codes)))


def client(factory: Callable[..., object], url: str, key: str) -> ChildObject:
    """Return one of the clients in a process of its own."""
    return ChildObject(f"{factory.__module__}:{factory.__qualname__}", url, key)


def _json(answer: httpx.Response) -> dict[str, Any]:
    if answer.is_error:
        raise RuntimeError(f"{answer.request.url}: {answer.status_code} {answer.text[:500]}")
    made: dict[str, Any] = answer.json()
    return made
