"""Jobs on a real engine, through the client: submitted, followed, fetched from elsewhere, cancelled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nnsight_engine import RemoteError
from nnsight_engine.remote_backend.client.backend import RemoteBackend
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.server import Server

PROMPT = "The Eiffel Tower is in the city of"
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model(narrow_server: Server, narrow: Path) -> VLLM:
    return VLLM(str(narrow), remote=narrow_server.base_url)


def test_a_job_gives_what_the_trace_gives(narrow_server: Server, model: VLLM) -> None:
    with model.trace(PROMPT):
        waited = model.layers[15].output.save()
    with model.trace(PROMPT, blocking=False) as tracer:
        print("one line")  # noqa: T201 - it is told as an event
        hidden = model.layers[15].output.save()  # noqa: F841 - read by its name
    job = tracer.backend.job
    statuses = [(event["status"], event.get("message")) for event in job.events()]
    assert statuses[:2] == [("RECEIVED", None), ("QUEUED", None)]
    assert ("LOG", "one line") in statuses
    assert statuses[-1] == ("COMPLETED", None)
    result = job.wait(60)
    assert torch.equal(result["hidden"], waited)
    # Somebody else, later, who knows its id.
    again = RemoteBackend(narrow_server.base_url, job_id=job.id)
    assert torch.equal(again()["hidden"], waited)


def test_many_jobs_share_the_engine(model: VLLM) -> None:
    jobs = []
    for count in range(8):
        with model.trace(PROMPT, max_tokens=4, blocking=False) as tracer:
            number = (model.layers[3].output.sum() * 0 + count).save()  # noqa: F841 - read by its name
        jobs.append(tracer.backend.job)
    assert [int(job.wait(120)["number"]) for job in jobs] == list(range(8))


def test_what_a_block_raises_comes_with_its_job(model: VLLM) -> None:
    with model.trace(PROMPT, blocking=False) as tracer:
        model.layers[3].output[:] = 1 / 0
    with pytest.raises(ZeroDivisionError):
        tracer.backend.job.wait(60)


def test_a_job_that_is_cancelled_leaves_the_engine(narrow_server: Server, model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=900, min_tokens=900, blocking=False) as tracer:
        kept = model.layers[0].output.save()
    job = tracer.backend.job
    for event in job.events():
        if event["status"] == "RUNNING":
            job.cancel()
    with pytest.raises(RemoteError) as caught:
        job.wait(60)
    assert caught.value.code == "job_cancelled"
    with model.trace(PROMPT):
        kept = model.layers[0].output.save()
    assert kept.ndim == 2
