"""Streamed traces: what each output carries, many at once, on any loop, left early, failing."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel, save
from nnsight_engine.vllm_backend.engines import AsyncEngine
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.families.checkpoints import write_checkpoint

pytestmark = pytest.mark.e2e

PROMPT = [5, 9, 11, 3, 17, 8]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("async"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[VLLM]:
    """Start an engine whose outputs are streamed; in the end it holds nothing of any trace."""
    model = VLLM(
        str(folder), mode="async", dispatch=True, dtype="float32", enforce_eager=True, max_model_len=128
    )
    try:
        yield model
        # A worker hears of a request's end with the next step.
        asyncio.run(collected(traced_hidden(model, PROMPT, 1)))
        asyncio.run(collected(traced_hidden(model, PROMPT, 1)))
        (held,) = model.host.call("count_interventions")
        assert {name: count for name, count in held.items() if count} in ({}, {"traced": 1})
    finally:
        model.shutdown()


def traced_hidden(model: VLLM, prompt: list[int], max_tokens: int) -> Any:
    """Return a trace that saves one layer at every step, and its tokens."""
    with model.trace(prompt, max_tokens=max_tokens, **GREEDY) as tracer:
        hidden, tokens = save([]), save([])
        for _ in tracer.iter[:]:
            hidden.append(model.layers[1].output)
            tokens.append(model.samples.output.item())
        answer = tracer.result.save()  # noqa: F841 - looked up by name
    return tracer


async def collected(tracer: Any) -> list[Any]:
    return [output async for output in tracer.backend()]


def test_each_output_carries_what_was_saved_up_to_its_tokens(model: VLLM, folder: Path) -> None:
    outputs = asyncio.run(collected(traced_hidden(model, PROMPT, 5)))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for output in outputs:
        assert output.saves["tokens"] == list(output.outputs[0].token_ids)
        assert len(output.saves["hidden"]) == len(output.saves["tokens"])
    last = outputs[-1].saves
    assert list(last["answer"].outputs[0].token_ids) == last["tokens"]
    local = LanguageModel(str(folder), dispatch=True, dtype=torch.float32)
    with local.trace(torch.tensor([PROMPT + last["tokens"][:-1]])):
        expected = local.layers[1].output.save()
    torch.testing.assert_close(torch.cat(last["hidden"]), expected[0], rtol=1e-3, atol=1e-4)


def test_many_traces_at_once_and_a_new_loop_each_time(model: VLLM) -> None:
    async def all_of_them() -> list[list[Any]]:
        prompts = [[*PROMPT, extra] for extra in range(20, 26)]
        return await asyncio.gather(*(collected(traced_hidden(model, prompt, 4)) for prompt in prompts))

    together = asyncio.run(all_of_them())
    alone = asyncio.run(collected(traced_hidden(model, [*PROMPT, 22], 4)))
    torch.testing.assert_close(
        torch.cat(together[2][-1].saves["hidden"]), torch.cat(alone[-1].saves["hidden"]), rtol=1e-4, atol=1e-4
    )
    assert together[2][-1].saves["tokens"] == alone[-1].saves["tokens"]


def test_several_invokes_share_their_variables(model: VLLM) -> None:
    with model.trace(max_tokens=2, **GREEDY) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(PROMPT):
            clean = model.layers[1].output.clone()
            barrier()
        with tracer.invoke(list(reversed(PROMPT)), max_tokens=3):
            barrier()
            model.layers[1].output = clean
            patched = model.layers[1].output.save()  # noqa: F841 - as above
            logits = model.logits.output.save()  # noqa: F841 - as above
    outputs = asyncio.run(collected(tracer))
    assert {output.invoke for output in outputs} == {0, 1}
    finished = {output.invoke: output for output in outputs if output.finished}
    assert [len(finished[index].outputs[0].token_ids) for index in (0, 1)] == [2, 3]
    assert finished[1].saves["patched"].shape[0] == len(PROMPT)
    assert finished[1].saves["logits"].shape[0] == 1
    assert not finished[0].saves


def test_caches_edits_and_scans_are_there_too(model: VLLM) -> None:
    with model.edit(name="force"):
        model.samples.output[:] = 7
    with pytest.raises(RuntimeError, match="size mismatch"), model.trace(PROMPT, validate=True):
        model.layers[1].output @ torch.ones(3)
    with model.scan(PROMPT):
        hidden = model.layers[1].output.save()
    assert (hidden.shape, hidden.is_meta) == ((len(PROMPT), 128), True)
    with model.trace(PROMPT, max_tokens=3, edits=["force"], validate=True, **GREEDY) as tracer:
        cache = tracer.cache(modules=[model.layers[1]])
        kept = save({"so far": cache})  # noqa: F841 - as above
    *outputs, last = asyncio.run(collected(tracer))
    model.remove_edit("force")
    assert list(last.outputs[0].token_ids) == [7, 7, 7]
    assert [len(rows) for rows in last.saves["cache"].model.layers[1].output] == [len(PROMPT), 1, 1]
    assert last.saves["kept"]["so far"].model.layers[1].output[2].shape == (1, 128)
    assert not any("cache" in output.saves for output in outputs), "half a cache looks like a whole one"


def test_a_block_that_fails_raises_where_the_outputs_are_read(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=50, **GREEDY) as tracer:
        for step in tracer.iter[:]:
            if step == 2:
                model.layers[1].output[:] = torch.zeros(3, 3, 3)
    with pytest.raises(RuntimeError) as caught:
        asyncio.run(collected(tracer))
    assert "torch.zeros(3, 3, 3)" in "".join(traceback.format_exception(caught.value))
    assert asyncio.run(collected(traced_hidden(model, PROMPT, 2)))[-1].finished


@pytest.mark.parametrize("how", ["break", "cancel"])
def test_a_closed_stream_ends_its_requests(model: VLLM, how: str) -> None:
    async def leave() -> None:
        outputs = traced_hidden(model, PROMPT, 100).backend()
        if how == "break":
            async for _ in outputs:
                break
            await outputs.aclose()
            return
        task = asyncio.create_task(collected(traced_hidden(model, PROMPT, 100)))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert not model.engine.output_processor.request_states
    assert isinstance(model.host, AsyncEngine)
    assert len(model.engine.traces) == 0


def test_outputs_are_streamed_once(model: VLLM) -> None:
    tracer = traced_hidden(model, PROMPT, 1)
    asyncio.run(collected(tracer))
    with pytest.raises(ValueError, match="once"):
        tracer.backend()


def test_the_mode_is_sync_or_async() -> None:
    with pytest.raises(ValueError, match="sync"):
        VLLM("x", mode="both")  # type: ignore[arg-type] # a wrong value
