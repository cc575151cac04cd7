"""Code of sandboxed keys on a server of two tensor-parallel ranks: run in a process, with equal values."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest
import torch

import nnsight_engine
from nnsight_engine import save
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.keyed import serving_several
from tests.e2e.point_blocks import PROMPT
from tests.families.checkpoints import write_checkpoint
from tests.monitoring import OURS, Exposition

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

BLOCKS: Final = {
    "heads of both ranks": "model.layers[1].attn.heads[:, 1:] *= 2\nh = model.layers[2].output.save()",
    "queries": "h = model.layers[1].attn.q.save()",
    "a module of both ranks": "h = model.model.layers[1].mlp(model.layers[1].output).save()",
    "each token": "h = [].save()\nfor step in tracer.iter[:]:\n    h.append(model.logits.output[0, :8])",
}
_COUNTED_S: Final = 1.1
"""After which the server has asked the engine for its counts again."""


@dataclasses.dataclass(frozen=True)
class Served:
    """A server and its model, a key whose code is trusted, one without trust, and one that sees metrics."""

    url: str
    model: str
    trusted: str
    untrusted: str
    monitor: str

    def num_sandboxes(self) -> float:
        """Return how many traces have been given a sandbox process."""
        time.sleep(_COUNTED_S)
        answer = httpx.get(f"{self.url}/metrics", headers=_of(self.monitor), timeout=60)
        return Exposition(answer.text).value(f"{OURS}sandboxes_total", event="started")

    def saved(self, code: str, key: str) -> Any:
        """Return the value of `h` that code beside a completion has saved."""
        body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        body["interventions"] = [{"op": "trace", "code": code, "name": "t"}]
        answer = httpx.post(f"{self.url}/v1/completions", json=body, headers=_of(key), timeout=180)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["interventions"]["results"]["t"]["saves"]["h"]


def _of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve a tiny model on two ranks."""
    checkpoint = write_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    arguments = ["--tensor-parallel-size", "2", "--max-model-len", "64"]
    with serving_several(checkpoint, tmp_path_factory.mktemp("data"), arguments) as (server, keys):
        yield Served(server.base_url, str(checkpoint), **keys)


@pytest.mark.parametrize("block", BLOCKS)
def test_code_without_trust_gives_from_a_process_what_trusted_code_gives(block: str, served: Served) -> None:
    before = served.num_sandboxes()
    expected = served.saved(BLOCKS[block], served.trusted)
    assert served.num_sandboxes() == before
    assert served.saved(BLOCKS[block], served.untrusted) == expected
    assert served.num_sandboxes() == before + 1


def test_so_does_a_trace_of_the_library(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = VLLM(served.model, remote=served.url), []
    for key in (served.trusted, served.untrusted):
        monkeypatch.setattr(nnsight_engine.CONFIG.API, "KEY", key)
        before = served.num_sandboxes()
        with model.trace(PROMPT, max_tokens=2, temperature=0.0, ignore_eos=True) as tracer:
            tokens = save([])
            values = model.layers[1].attn.v.save()
            for _ in tracer.iter[:]:
                tokens.append(model.samples.output.item())
        found.append((values, tokens, served.num_sandboxes() - before))
    (trusted_values, trusted_tokens, none), (values, tokens, one) = found
    assert (none, one) == (0, 1)
    assert tokens == trusted_tokens
    assert torch.equal(values, trusted_values)


def test_weights_of_the_ranks_are_for_trusted_code_only(served: Served) -> None:
    code = "h = save(model.model.embed_tokens.weight.shape[0])"
    assert served.saved(code, served.trusted) > 0
    body: dict[str, Any] = {"prompt": PROMPT, "interventions": [{"op": "trace", "code": code, "name": "t"}]}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, headers=_of(served.untrusted), timeout=180)
    assert answer.status_code == 400
    assert "weight" in answer.json()["error"]["message"]
