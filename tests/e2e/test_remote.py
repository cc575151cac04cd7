"""``remote=`` on ``VLLM``: the block runs on the server, and leaves here what it would have left of itself.

One server of the narrow model for all of them.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

import nnsight_engine
from nnsight_engine import RemoteBackend, RemoteError, save
from nnsight_engine.serialization import EncodeError
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.server import Server
from tests.hook_reference import first, outputs_of
from tests.narrow_model import NEXT, PROMPT, WIDTH

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model(narrow_server: Server, narrow: Path) -> VLLM:
    return VLLM(str(narrow), remote=narrow_server.base_url)


def test_the_server_says_what_it_runs(narrow_server: Server, narrow: Path, model: VLLM) -> None:
    status = nnsight_engine.status(narrow_server.base_url)
    (found,) = status.models
    assert (status.phase, found.running) == ("ready", True)
    assert "vllm" in found.engines
    assert found.name in str(status)
    for name in (found.name, narrow, str(narrow), f"{narrow}/", model.to_model_key()):
        assert nnsight_engine.is_model_running(name, narrow_server.base_url)
    assert nnsight_engine.ndif_status(narrow_server.base_url).models == status.models
    assert not nnsight_engine.is_model_running("gpt2", narrow_server.base_url)


def test_the_tree_is_the_servers(model: VLLM) -> None:
    assert len(model.layers) == 30
    assert "LlamaDecoderLayer" in repr(model)
    assert model.points()["layers.3.attn.heads"] == (4, 32)
    assert model.tokenizer.decode(model.tokenizer.encode("hi")) == "hi"


def test_values_come_home_and_are_the_models(model: VLLM, reference: Any) -> None:
    with model.trace(PROMPT, temperature=0) as tracer:
        hidden = model.layers[15].output.save()
        logits = model.logits.output.save()
        result = tracer.result.save()
    ids = {"input_ids": torch.tensor([model.tokenizer.encode(PROMPT)])}
    with torch.no_grad():
        expected = first(outputs_of(reference, ids, "model.layers.15")[0])[0]
    assert hidden.shape == expected.shape
    assert torch.cosine_similarity(hidden.float(), expected).min() > 0.999
    assert model.tokenizer.decode(logits[0].argmax().item()) == NEXT
    assert result.outputs[0].text == NEXT
    assert tracer.backend.job_status == "COMPLETED"
    assert tracer.backend.engine == "vllm"
    assert tracer.backend.job_id


def test_large_values_come_home(model: VLLM) -> None:
    with model.trace(PROMPT):
        numbers = save(torch.arange(4_000_000))
        half = model.layers[3].output.save()
    assert torch.equal(numbers, torch.arange(4_000_000))
    numbers += 1  # it is ours
    assert half.shape[-1] == WIDTH
    # Nothing is left of how it came.
    left = Path("/dev/shm", f"nnsight-engine-{os.getuid()}").rglob("*")
    assert {path.name for path in left if path.is_file()} == {".lock"}


def test_errors_are_the_users_own(model: VLLM) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace(PROMPT):
            kept = model.layers[1].output.save()
            1 / 0  # the line
    assert kept.shape[-1] == WIDTH
    entries = traceback.extract_tb(caught.value.__traceback__)
    assert any("1 / 0  # the line" in (entry.line or "") for entry in entries)


def test_prints_arrive(model: VLLM, capfd: pytest.CaptureFixture[str]) -> None:
    with model.trace(PROMPT):
        hidden = model.layers[3].output.save()
        print("shape", hidden.shape)  # noqa: T201 - what the test is about
    assert "LOG" in (out := capfd.readouterr().out)
    assert f"shape {hidden.shape}" in out


def test_edits_travel(model: VLLM) -> None:
    with model.edit(name="silence") as edited:
        model.layers[20].output[:] = 0
    with edited.trace(PROMPT):
        silent = model.layers[20].output.abs().sum().save()
    with model.trace(PROMPT):
        loud = model.layers[20].output.abs().sum().save()
    with model.trace(PROMPT, edits=["silence"]):
        chosen = model.layers[20].output.abs().sum().save()
    assert (silent, chosen) == (0, 0)
    assert loud > 0


def test_what_the_server_refuses_is_typed(narrow_server: Server, model: VLLM, narrow: Path) -> None:
    other = VLLM("gpt2", remote=narrow_server.base_url)
    with pytest.raises(RemoteError) as caught:
        with other.trace(PROMPT):
            other.layers[0].output.save()
    assert caught.value.code == "model_not_found"
    with pytest.raises(RemoteError, match="top_p"):
        with model.trace(PROMPT, top_p=7):
            model.layers[0].output.save()
    with pytest.raises(EncodeError, match="lock"):
        lock = __import__("threading").Lock()
        with model.trace(PROMPT):
            lock.acquire()


def test_a_prompt_that_is_too_long_is_refused(model: VLLM) -> None:
    with pytest.raises(RemoteError, match="1024") as caught:
        with model.trace([1] * 2000):
            model.layers[0].output.save()
    assert caught.value.status == 400


def test_sessions_run_as_one_request(model: VLLM) -> None:
    other = "Shaquille O'Neal plays the sport of"
    with model.session() as session:
        norms = nnsight_engine.save([])
        for layer in (3, 9):
            with model.trace(PROMPT):
                hidden = model.layers[layer].output[-1]  # not saved
            with model.trace(other):
                model.layers[layer].output[-1] = hidden
                after = model.layers[layer].output[-1].save()
            norms.append((layer, torch.equal(after, hidden)))
    with model.trace(PROMPT):
        alone = model.layers[9].output[-1].save()
    assert norms == [(3, True), (9, True)]
    assert torch.equal(after, alone)
    assert session.backend.engine
    with pytest.raises(NameError):
        _ = hidden


def test_sampling_parameters_travel_as_objects_and_names(model: VLLM) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    with model.trace(sampling_params=params) as tracer:
        results = save([])
        own = SamplingParams(max_tokens=3, ignore_eos=True)
        invokes: list[dict[str, Any]] = [{}, {"max_tokens": 2}, {"sampling_params": own}]
        for options in invokes:
            with tracer.invoke(np.array(model.tokenizer.encode(PROMPT)), **options):
                results.append(tracer.result)
    assert [len(result.outputs[0].token_ids) for result in results] == [4, 2, 3]
    refused: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"nonsense": 8}, RemoteError),
        ({"sampling_params": 3}, EncodeError),
    ]
    for options, error in refused:
        with pytest.raises(error):
            with model.trace(PROMPT, **options):
                pass


async def test_jobs_go_on_without_us(narrow_server: Server, model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=3, temperature=0, blocking=False) as tracer:
        hidden = model.layers[15].output[-1].save()
        print("from the job")  # noqa: T201 - what the test is about
    backend = tracer.backend
    assert isinstance(backend, RemoteBackend)
    assert backend.job_status == "RECEIVED"
    with pytest.raises(NameError):
        _ = hidden
    result = await backend
    assert result["id"] == backend.job_id
    assert result["hidden"].shape == (WIDTH,)
    assert (backend.job_status, backend.engine) == ("COMPLETED", "vllm")
    statuses = [event["status"] for event in backend.events()]
    assert statuses[-1] == "COMPLETED"
    assert "LOG" in statuses
    assert backend() is backend.wait()  # what is there already
    again = RemoteBackend(narrow_server.base_url, job_id=backend.job_id)()
    assert again is not None
    assert torch.equal(again["hidden"], result["hidden"])


def test_many_jobs_share_the_engine(model: VLLM) -> None:
    backends = []
    for count in range(8):
        with model.trace(PROMPT, max_tokens=4, blocking=False) as tracer:
            number = (model.layers[3].output.sum() * 0 + count).save()  # noqa: F841 - read by its name
        backends.append(tracer.backend)
    assert [int(backend.wait(timeout_s=120)["number"]) for backend in backends] == list(range(8))


def test_jobs_are_waited_for_no_longer_than_asked_and_can_be_ended(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=900, ignore_eos=True, blocking=False) as tracer:
        for _ in tracer.iter[:]:
            model.layers[15].output.save()
    backend = tracer.backend
    assert isinstance(backend, RemoteBackend)
    with pytest.raises(TimeoutError, match="it goes on"):
        backend.wait(timeout_s=0.3)
    backend.cancel()
    with pytest.raises(RemoteError) as caught:
        backend.wait(timeout_s=30)
    assert backend.job_status == "CANCELLED"
    assert caught.value.code == "job_cancelled"


def test_a_jobs_block_error_is_raised_where_its_result_is_asked_for(model: VLLM) -> None:
    with model.trace(PROMPT, blocking=False) as tracer:
        model.layers[3].output[99999].save()
    backend = tracer.backend
    assert isinstance(backend, RemoteBackend)
    with pytest.raises(IndexError):
        backend.wait(timeout_s=30)
    assert backend.job_status == "ERROR"


def test_an_error_that_is_no_text_ends_its_own_trace_alone(model: VLLM) -> None:
    for _ in range(2):  # the engine goes on
        with pytest.raises(ValueError, match="wrong"):
            with model.trace(PROMPT):
                raise ValueError("wrong \ud800")
