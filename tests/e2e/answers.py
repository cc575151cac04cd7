"""Completions over HTTP, whole and streamed, and the tensors in their answers."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from nnsight_engine.core.tensors import tensor_from_bytes
from tests.narrow_model import PROMPT

COMPLETIONS = "/v1/completions"


def tensor_of(sent: Any) -> npt.NDArray[Any]:
    """Return an inline tensor: float32, or int64."""
    data = base64.b64decode(sent["data"])
    if sent["dtype"] == "int64":
        return np.frombuffer(data, np.int64).reshape(sent["shape"])
    found: npt.NDArray[Any] = tensor_from_bytes(sent["dtype"], sent["shape"], data).float().numpy()
    return found


def answer(client: httpx.Client, *operations: Any, **more: Any) -> dict[str, Any]:
    """Return the only choice of a completion."""
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **more}
    reply = client.post(COMPLETIONS, json={**body, "interventions": operations})
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def streamed(client: httpx.Client, path: str = COMPLETIONS, **body: Any) -> list[dict[str, Any]]:
    """Return the choices of a stream's events."""
    reply = client.post(path, json={"temperature": 0, "stream": True, **body})
    assert reply.status_code == 200, reply.text
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    return [choice for event in events for choice in event["choices"]]
