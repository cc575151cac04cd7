"""Which model is served and with which adapters, and when its engine counts as hung."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import pytest

from api_schemas.errors import ApiError
from app.engine.served_model import ServedModel
from app.engine.vllm_client import wait_stalled
from nnsight_engine.remote_backend.messages import TraceHead

MODEL = ServedModel(("smol", "smol-2"), "org/smol", "shape")


def head(model: str, **fields: str) -> TraceHead:
    return TraceHead(model=model, **{"dialect": "vllm", **fields})  # type: ignore[arg-type] # all of them are text


@pytest.mark.parametrize(
    "of",
    [
        head("smol"),
        head("smol-2"),
        head("org/smol"),
        head("org/smol/"),
        head("/home/me/checkpoints/x", fingerprint="shape"),
        head("C:\\models\\x", fingerprint="shape"),
        head("smol", revision="main"),
    ],
)
def test_its_own_are_taken(of: TraceHead) -> None:
    MODEL.check(of)


@pytest.mark.parametrize(
    "of",
    [
        head(""),
        head("gpt2"),
        head("org/other", fingerprint="shape"),  # another checkpoint of the same shape
        head("/home/me/checkpoints/x", fingerprint="other"),
        head("/home/me/checkpoints/x"),
        head("/srv/smol", fingerprint="other"),  # the same folder's name, on another machine
        head("smol", revision="step-1000"),
    ],
)
def test_those_of_other_models_are_not(of: TraceHead) -> None:
    with pytest.raises(ApiError) as caught:
        MODEL.check(of)
    assert caught.value.code == "model_not_found"


def test_its_names_are_those_that_traces_may_use() -> None:
    assert MODEL.all_names == ("smol", "smol-2", "org/smol")
    local = ServedModel(("small",), "/srv/checkpoints/smol/", "shape")
    assert local.all_names == ("small", "smol"), "where its folder is on the server is no name"
    for served in (MODEL, local):
        for name in served.all_names:
            served.check(head(name))


def test_a_model_whose_shape_is_not_known_goes_by_its_name_alone() -> None:
    unknown = ServedModel(("smol",), "/srv/smol")
    unknown.check(head("smol"))
    with pytest.raises(ApiError):
        unknown.check(head("/home/me/x", fingerprint=""))
    with pytest.raises(ApiError, match="revision 'main'"):
        ServedModel(("smol",), "smol", revision="v2").check(head("smol", revision="main"))


def test_an_adapter_is_a_model_for_blocks_of_vllm() -> None:
    adapted = ServedModel(("smol",), "org/smol", "shape", adapters=("pirate",))
    assert adapted.all_names == ("smol", "org/smol", "pirate")
    adapted.check(head("pirate"))
    with pytest.raises(ApiError) as caught:
        adapted.check(head("pirate", dialect="transformers"))
    assert caught.value.code == "unsupported_combination"
    with pytest.raises(ApiError):
        MODEL.check(head("pirate"))


async def is_noticed(ask: Callable[[], asyncio.Future[object]], limit_s: float, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await wait_stalled(ask, lambda: limit_s)
    except TimeoutError:
        return False
    return True


def asking(*answers_s: float) -> Callable[[], asyncio.Future[object]]:
    """Answer after so many seconds each, the last from then on."""
    left = list(answers_s)

    def ask() -> asyncio.Future[object]:
        return asyncio.ensure_future(asyncio.sleep(left.pop(0) if len(left) > 1 else left[0]))

    return ask


async def test_an_engine_that_answers_in_time_has_not_stalled_however_often_it_is_asked() -> None:
    assert not await is_noticed(asking(0.1), limit_s=0.6, within_s=1.5)


@pytest.mark.parametrize("answers_s", [(60,), (0.0, 0.05, 60)])
async def test_one_that_does_not_answer_has(answers_s: tuple[float, ...]) -> None:
    begin = time.monotonic()
    assert await is_noticed(asking(*answers_s), limit_s=0.2, within_s=50)
    assert time.monotonic() - begin >= 0.2


async def test_an_error_is_an_answer() -> None:
    async def fail() -> None:
        raise RuntimeError("no such thing")

    assert not await is_noticed(lambda: asyncio.ensure_future(fail()), limit_s=0.1, within_s=0.5)


async def test_what_blocks_may_take_is_waited_for_as_long_as_they_are_there() -> None:
    limits = [1.0]
    waiting = asyncio.create_task(wait_stalled(asking(60), lambda: limits[0]))
    await asyncio.sleep(0.4)
    assert not waiting.done()
    limits[0] = 0.1
    await asyncio.wait_for(waiting, 50)


async def test_time_in_which_no_thread_ran_does_not_count() -> None:
    """As where a machine sleeps, or a container is frozen, with the engine in it."""
    waiting = asyncio.create_task(wait_stalled(asking(60), lambda: 0.5))
    await asyncio.sleep(0.1)
    time.sleep(1)  # noqa: ASYNC251 - that is what is tested
    await asyncio.sleep(0.1)
    assert not waiting.done()
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize(
    ("source", "name", "is_other"),
    [
        ("meta-llama/Llama-3.2-1B", "llama-3.2-1b", False),
        ("meta-llama/Llama-3.2-1B", "unsloth/Llama-3.2-1B", False),
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct", True),
        ("openai-community/gpt2", "gpt2-small", False),
        ("gpt2", "EleutherAI/pythia-70m", True),
        ("/srv/Llama_3.2_1B/", "meta-llama/Llama-3.2-1B", False),
        ("/cache/models--google--gemma-2-2b/snapshots/" + "0a" * 20, "gemma-2-2b", False),
        ("/cache/models--google--gemma-2-2b/snapshots/" + "0a" * 20, "gemma-2-9b", True),
        ("/runs/7/checkpoint-400", "gpt2", False),  # who knows what this is
        ("/srv/gpt2", "/home/somebody/model", False),
        ("gpt2", "", False),
        ("gpt2", "...", False),
    ],
)
def test_a_file_of_another_model_is_known_by_the_name_in_it(source: str, name: str, is_other: bool) -> None:
    assert ServedModel((source,), source).is_other(name) == is_other
    assert not ServedModel((source, "alias"), source).is_other("org/Alias")
