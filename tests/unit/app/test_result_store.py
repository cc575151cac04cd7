"""The result store: what is kept, for how long, and what a stranger can reach."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from api_schemas.errors import ApiError
from app.limits.limit import Limit
from app.storage.results import ResultStore
from nnsight_engine.plans.collect.results import TensorResult
from tests.waiting import wait_for_async


class Clock:
    """Unix seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def tensor(num_floats: int, value: float = 1.5) -> TensorResult:
    return TensorResult("float32", (num_floats,), np.full(num_floats, value, "<f4").tobytes())


@contextlib.asynccontextmanager
async def started(store: ResultStore) -> AsyncIterator[ResultStore]:
    await store.start()
    try:
        yield store
    finally:
        await store.close()


async def content(store: ResultStore, result_id: str) -> bytes:
    return b"".join([chunk async for chunk in (await store.open(result_id, "acme")).chunks()])


async def exists(store: ResultStore, result_id: str, owner: str) -> bool:
    try:
        opened = await store.open(result_id, owner)
    except ApiError:
        return False
    _ = [chunk async for chunk in opened.chunks()]  # which ends the reading
    return True


async def assert_gone(store: ResultStore, result_id: str) -> None:
    with pytest.raises(ApiError) as caught:
        await store.open(result_id, "acme")
    assert caught.value.code == "result_not_found"
    assert caught.value.status == 404


def files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.safetensors"))


def folders(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_dir()]


async def until_empty(store: ResultStore, directory: Path) -> None:
    await wait_for_async(lambda: not store.used_bytes and not files(directory))


async def test_the_library_reads_what_was_stored(tmp_path: Path):
    tensors = {
        "a/layers.0.output": TensorResult("float16", (3,), np.arange(3, dtype="<f2").tobytes()),
        "b/layers.1.output": TensorResult("float32", (2, 3), np.arange(6, dtype="<f4").tobytes()),
        "c/samples": TensorResult("int64", (2,), np.arange(2, dtype="<i8").tobytes()),
        "d/empty": TensorResult("float32", (0, 3), b""),
    }
    async with started(ResultStore(tmp_path, ttl_s=60, limit=Limit("bytes", 10_000))) as store:
        stored = await store.put(tensors, "acme")
        data = await content(store, stored.id)
    assert len(data) == stored.num_bytes
    arrays = load(data)
    assert set(arrays) == set(tensors)
    np.testing.assert_array_equal(arrays["b/layers.1.output"], np.arange(6, dtype="f4").reshape(2, 3))
    np.testing.assert_array_equal(arrays["a/layers.0.output"], np.arange(3, dtype="f2"))
    np.testing.assert_array_equal(arrays["c/samples"], np.arange(2))


async def test_an_expired_file_goes_without_being_asked_for(tmp_path: Path):
    async with started(ResultStore(tmp_path, ttl_s=0.1, limit=Limit("bytes", 10_000))) as store:
        await store.put({"a": tensor(4)}, "acme")
        await until_empty(store, tmp_path)


async def test_the_oldest_go_first_when_the_store_is_full(tmp_path: Path):
    async with started(ResultStore(tmp_path, ttl_s=60, limit=Limit("bytes", 2500))) as store:
        first, second, third = [await store.put({"a": tensor(200)}, "acme") for _ in range(3)]
        await assert_gone(store, first.id)
        await content(store, second.id)
        await content(store, third.id)
        assert store.used_bytes <= 2500
        assert sum(path.stat().st_size for path in files(tmp_path)) == store.used_bytes


async def test_a_result_beyond_the_whole_limit_is_refused_and_evicts_nothing(tmp_path: Path):
    async with started(ResultStore(tmp_path, ttl_s=60, limit=Limit("bytes", 2500))) as store:
        kept = await store.put({"a": tensor(200)}, "acme")
        with pytest.raises(ApiError, match="2500 bytes") as caught:
            await store.put({"a": tensor(2000)}, "acme")
        assert caught.value.code == "capture_too_large"
        await content(store, kept.id)


async def test_concurrent_writes_never_exceed_the_limit(tmp_path: Path):
    async with started(ResultStore(tmp_path, ttl_s=60, limit=Limit("bytes", 2500))) as store:
        outcomes = await asyncio.gather(
            *[store.put({"a": tensor(200)}, "acme") for _ in range(8)], return_exceptions=True
        )
        refused = [outcome for outcome in outcomes if isinstance(outcome, ApiError)]
        assert len(refused) == 6
        assert {error.code for error in refused} == {"engine_capture_full"}
        assert store.used_bytes <= 2500


async def test_ids_are_long_and_never_repeat(tmp_path: Path):
    async with started(ResultStore(tmp_path, ttl_s=60, limit=Limit("bytes", 100_000))) as store:
        ids = {(await store.put({"a": tensor(1)}, "acme")).id for _ in range(50)}
    assert len(ids) == 50
    assert all(len(result_id) == 32 for result_id in ids)


async def test_a_cancelled_put_leaves_nothing(tmp_path: Path):
    async with started(ResultStore(tmp_path, ttl_s=60, limit=Limit("bytes", 10_000))) as store:
        put = asyncio.create_task(store.put({"a": tensor(200)}, "acme"))
        await asyncio.sleep(0)
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        await until_empty(store, tmp_path)


async def test_a_disk_that_refuses_is_an_error_and_counts_nothing(tmp_path: Path):
    async with started(ResultStore(tmp_path, ttl_s=60, limit=Limit("bytes", 10_000))) as store:
        (folder,) = folders(tmp_path)
        folder.rename(tmp_path / "moved")
        with pytest.raises(ApiError) as caught:
            await store.put({"a": tensor(4)}, "acme")
        assert caught.value.status == 503
        assert store.used_bytes == 0


async def test_start_removes_what_dead_processes_left_and_nothing_else(tmp_path: Path):
    dead, foreign = tmp_path / "123-dead", tmp_path / "notes"
    for folder in (dead, foreign):
        folder.mkdir()
        (folder / "left.safetensors").write_bytes(b"x")
    (dead / ".lock").touch()
    living = ResultStore(tmp_path, ttl_s=60, limit=Limit("bytes", 10_000))
    async with started(living):
        stored = await living.put({"a": tensor(4)}, "acme")
        async with started(ResultStore(tmp_path, ttl_s=60, limit=Limit("bytes", 10_000))):
            assert not dead.exists()
            assert (foreign / "left.safetensors").exists()
            await content(living, stored.id)


@pytest.mark.parametrize(
    "bad", [TensorResult("complex64", (1,), bytes(8)), TensorResult("float32", (2,), b"")]
)
async def test_a_tensor_the_format_cannot_hold_is_refused(tmp_path: Path, bad: TensorResult):
    async with started(ResultStore(tmp_path, ttl_s=60, limit=Limit("bytes", 10_000))) as store:
        with pytest.raises(ValueError, match="tensor"):
            await store.put({"a": bad}, "acme")
        assert store.used_bytes == 0


async def test_a_tenants_share_is_its_own_and_the_largest_gives_way(tmp_path: Path):
    async with started(ResultStore(tmp_path, ttl_s=60, limit=Limit("bytes", 10_000, 0.5))) as store:

        async def put(owner: str, num_files: int) -> list[str]:
            return [(await store.put({"a": tensor(400)}, owner)).id for _ in range(num_files)]

        small = await put("small", 1)
        acme = await put("acme", 4)  # of which two have room
        rival = await put("rival", 2)
        assert [await exists(store, one, "small") for one in small] == [True]
        assert [await exists(store, one, "acme") for one in acme] == [False, False, True, True]
        assert [await exists(store, one, "rival") for one in rival] == [True, True]
        another = await put("another", 2)  # the sixth and the seventh file of five or six
        assert store.used_bytes <= 10_000
        assert await exists(store, small[0], "small")
        assert [await exists(store, one, "another") for one in another] == [True, True]
        with pytest.raises(ApiError, match="5000 bytes"):
            await store.put({"a": tensor(1400)}, "acme")


async def test_what_is_read_counts_until_it_is_closed(tmp_path: Path):
    clock = Clock()
    store = ResultStore(tmp_path, ttl_s=60, limit=Limit("bytes", 10_000, 0.5), clock=clock)
    async with started(store):
        ids = [(await store.put({"a": tensor(500)}, "acme")).id for _ in range(2)]
        readers = [await store.open(result_id, "acme") for result_id in (*ids, ids[1])]
        used = store.used_bytes
        # Neither is one of them taken from its reader for a new one, nor is there room for more.
        with pytest.raises(ApiError) as caught:
            await store.put({"a": tensor(500)}, "acme")
        assert caught.value.code == "engine_capture_full"
        await store.put({"a": tensor(500)}, "rival")
        await readers[0].close()
        await store.put({"a": tensor(500)}, "acme")
        await assert_gone(store, ids[0])
        # Time takes all, but what is read is still there.
        clock.now += 61
        await assert_gone(store, ids[1])
        assert store.used_bytes == 3 * used // 2
        for reader in readers[1:]:
            await reader.close()
            await reader.close()
        assert store.used_bytes == used


async def test_one_tenant_reads_so_many_at_once(tmp_path: Path):
    store = ResultStore(tmp_path, ttl_s=60, limit=Limit("bytes", 10_000))
    async with started(store):
        ids = {name: (await store.put({"a": tensor(10)}, name)).id for name in ("acme", "rival")}
        readers = [await store.open(ids["acme"], "acme") for _ in range(64)]
        with pytest.raises(ApiError) as caught:
            await store.open(ids["acme"], "acme")
        assert (caught.value.code, caught.value.status) == ("rate_limit_exceeded", 429)
        await (await store.open(ids["rival"], "rival")).close()
        for reader in readers:
            await reader.close()
        await (await store.open(ids["acme"], "acme")).close()
