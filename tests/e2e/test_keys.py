"""Keys on a real server: clients of every kind send them, and tenants share nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

import nnsight_engine
from nnsight_engine import RemoteBackend, RemoteError, save
from nnsight_engine.modeling.bundled import BUNDLED_MODEL_NAME
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.keyed import SCOPES, KeyedServer, Tenant
from tests.waiting import wait_for

LONG = "The Eiffel Tower is in the city of Paris. " * 20
STEER = {"op": "steer", "at": "layers.5.output", "vector": [0.01] * 576}
LENS = {"op": "logit_lens", "layers": "all", "top_k": 3, "name": "lens"}
SLOW_CODE = "total = 0\nfor number in range(100_000):\n    total += number\nkept = save(total)"
pytestmark = pytest.mark.e2e


class Keyed:
    def __init__(self, found: KeyedServer) -> None:
        self.found, self.url = found, found.server.base_url
        self.ours, self.theirs = found.keys["acme"], found.keys["rival"]

    def limited(self, **limits: float) -> Tenant:
        """Return a client with a key of its own that may do so much."""
        new = {"tenant": "acme", "tier": "trusted", "limits": limits, "scopes": SCOPES}
        made = self.found.tenant("admin").post("/v1/admin/keys", json=new).json()
        return Tenant(self.found.server, made["key"])

    def num_cached(self, name: str) -> int:
        """Return how many tokens of a long prompt, which no other test sends, were computed before."""
        usage = self.found.tenant(name).complete(prompt=f"Where? {LONG}", max_tokens=1).json()["usage"]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


@pytest.fixture(scope="module")
def keyed(keyed_server: KeyedServer) -> Keyed:
    return Keyed(keyed_server)


def test_openais_client_sends_them(keyed: Keyed) -> None:
    with pytest.raises(openai.AuthenticationError, match="is unknown"):
        openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="nns_wrong").models.list()
    client = openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=keyed.ours)
    (model,) = client.models.list()
    answer = client.completions.create(
        model=model.id, prompt="The Eiffel Tower is in the city of", max_tokens=1, temperature=0
    )
    assert answer.choices[0].text == " Paris"


def test_ours_sends_them_too(keyed: Keyed, bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nnsight_engine.CONFIG.API, "KEY", keyed.ours)
    model = VLLM(str(bundled), remote=keyed.url)
    with model.trace("The Eiffel Tower is in the city of", blocking=False) as tracer:
        hidden = save(model.layers[3].output)  # noqa: F841 - the job brings it
    assert tracer.backend.wait()["hidden"].shape[-1] == 576
    theirs = RemoteBackend(keyed.url, key=keyed.theirs, job_id=tracer.backend.job_id)
    with pytest.raises(RemoteError) as caught:
        theirs()
    assert caught.value.code == "job_not_found"


def test_tenants_share_no_prefix_cache(keyed: Keyed) -> None:
    counts = [keyed.num_cached(name) for name in ("acme", "acme", "rival", "rival")]
    assert counts[0] == counts[2] == 0
    assert counts[1] == counts[3] > 100


LIMIT = 100_000


def num_used(client: httpx.Client, **body: object) -> int:
    """Return how many tokens a key has used; a request tells, and has set two aside for itself."""
    wanted = {"prompt": [1], "max_tokens": 1, **body}
    answer = client.post("/v1/completions", json=wanted)
    assert answer.status_code == 200, answer.text
    return LIMIT - int(answer.headers["x-ratelimit-remaining-tokens"]) - 2


@pytest.mark.parametrize("interventions", [[], [STEER], [{"op": "trace", "code": "pass"}]])
def test_tokens_are_counted_to_the_last(keyed: Keyed, interventions: list[object]) -> None:
    client = keyed.limited(tokens_per_minute=LIMIT)
    more = {"interventions": interventions} if interventions else {}
    body = {"prompt": "The Eiffel Tower is in", "max_tokens": 20, "n": 2, "ignore_eos": True, **more}
    usage = client.post("/v1/completions", json=body).json()["usage"]
    assert usage["total_tokens"] >= 40
    assert 0 <= usage["total_tokens"] - num_used(client) <= 2  # a minute of the clock may have begun
    # Whoever leaves has used what was made for them until then, whether or not it was sent.
    before = num_used(client)
    long = {"prompt": "One, two,", "max_tokens": 900, "ignore_eos": True, **more}
    with client.stream("POST", "/v1/completions", json={**long, "stream": True}) as answer:
        next(answer.iter_lines())
    assert 2 <= until_counted(client) - before < 700
    start = time.monotonic()
    client.post("/v1/completions", json={**long, "max_tokens": 4})
    taken_s = time.monotonic() - start
    before = num_used(client)
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=long, timeout=max(1.0, 2 * taken_s))
    assert 2 <= until_counted(client) - before < 700


def until_counted(client: httpx.Client) -> int:
    """Return how many tokens a key has used once a request is over that its client has left."""

    def counted() -> int:
        used = num_used(client)
        return used if used < LIMIT // 2 and used == num_used(client) - 2 else 0

    return wait_for(counted)


@pytest.mark.parametrize("operation", [STEER, LENS, {"op": "trace", "code": SLOW_CODE}])
def test_the_time_of_interventions_is_measured_where_they_run(
    keyed: Keyed, operation: dict[str, object]
) -> None:
    client = keyed.limited(intervention_seconds_per_minute=0.00001)
    body = {"prompt": LONG, "max_tokens": 4, "interventions": [operation]}
    assert client.post("/v1/completions", json=body).status_code == 200
    refused = client.post("/v1/completions", json=body)
    assert refused.status_code == 429, refused.text
    assert "seconds of interventions" in refused.json()["error"]["message"]
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_pickled_trace_runs_for_a_key_that_may_send_it(keyed: Keyed, bundled: Path) -> None:
    def run(key: str | None) -> Any:
        model = VLLM(str(bundled), remote=keyed.url)
        without_source = eval("lambda value: value * 3")
        sparse = torch.eye(2).to_sparse()
        backend = RemoteBackend(keyed.url, key=key, codec="cloudpickle", model_key=BUNDLED_MODEL_NAME)
        with model.trace("The Eiffel Tower", backend=backend, temperature=0.0):
            hidden = model.layers[5].output[-1].float()
            kept = save([without_source(hidden), hidden, sparse.to_dense()])
        return kept  # noqa: RET504 - the trace binds it

    tripled, hidden, dense = run(keyed.ours)
    torch.testing.assert_close(tripled, 3 * hidden)
    assert dense.tolist() == [[1, 0], [0, 1]]
    with pytest.raises(RemoteError, match="'wire'") as caught:
        run(keyed.theirs)
    assert caught.value.code == "codec_not_allowed"
