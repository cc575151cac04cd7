"""Keys on a real server: clients of every kind send them, and tenants share nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

import nnsight_engine
from app.cli import main
from nnsight_engine import RemoteBackend, RemoteError, save
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.server import Server

LONG = "The Eiffel Tower is in the city of Paris. " * 20
pytestmark = pytest.mark.e2e


class Keyed:
    """A server, and the keys of two tenants."""

    def __init__(self, server: Server, ours: str, theirs: str) -> None:
        self.url, self.ours, self.theirs = server.base_url, ours, theirs

    def num_cached(self, key: str) -> int:
        """Return how many tokens of a long prompt were computed for somebody before."""
        body = {"prompt": LONG, "max_tokens": 1}
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=60)
        return int((answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NNSIGHT_ENGINE_DATA_DIR", str(folder))
        keys = [made(patch, tenant) for tenant in ("acme", "rival")]
    arguments = ["--host", "0.0.0.0", "--max-model-len", "1024", "--enable-prompt-tokens-details"]
    with Server(arguments=arguments, environment={"NNSIGHT_ENGINE_DATA_DIR": str(folder)}) as server:
        yield Keyed(server, *keys)


def made(patch: pytest.MonkeyPatch, tenant: str) -> str:
    """Return a key as the command prints it."""
    shown: list[str] = []
    patch.setattr("typer.echo", lambda text, err=False: None if err else shown.append(text))
    scopes = "completions,interventions,code"
    assert main(["keys", "create", "--tenant", tenant, "--scopes", scopes, "--tier", "trusted"]) == 0
    (key,) = shown
    return key


def test_openais_client_sends_them(keyed: Keyed) -> None:
    with pytest.raises(openai.AuthenticationError, match="not known here"):
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
    counts = [keyed.num_cached(key) for key in (keyed.ours, keyed.ours, keyed.theirs, keyed.theirs)]
    assert counts[0] == counts[2] == 0
    assert counts[1] == counts[3] > 100
