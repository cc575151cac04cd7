"""What every end-to-end test needs: vLLM's environment, the bundled model, its Hugging Face twin."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

# Before vLLM is imported: one process, so that a test can look inside, and little memory.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # of plain engines too
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import pytest_asyncio
from vllm.platforms.cpu import CpuPlatform

from nnsight_engine.modeling.bundled import bundled_model_path
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.engine_kinds import kind_of_process
from tests.e2e.graphed_platform import graphed_engines
from tests.e2e.harness import Engine
from tests.e2e.keyed import KeyedServer, serving_keys
from tests.e2e.live import Live, live_server_in_a_thread
from tests.e2e.renamed_model import renamed_engine
from tests.e2e.server import Server
from tests.e2e.strict_answers import checked_answers
from tests.e2e.watching import Watch, watched_reads
from tests.families.checkpoints import write_checkpoint
from tests.families.reference import load_reference_model
from tests.memory import frozen_heap
from tests.narrow_model import NAME, write_narrow_model
from tests.parallel import SHARED_FIXTURES
from tests.sharing import SHARED, bring_together, is_last, shared, uses


@pytest.fixture(scope="session", autouse=True)
def kernels_bound_once() -> Iterator[None]:
    """Have vLLM search all imported modules for its kernels once, not for each engine of this process."""
    bind = CpuPlatform.register_triton_kernel_overrides
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, bind.__name__, staticmethod(functools.cache(bind)))
        yield


@pytest.fixture(scope="session", autouse=True)
def graphs() -> Iterator[None]:
    """Let engines have graphs in a process of such a kind."""
    kind = kind_of_process()
    with graphed_engines() if kind is not None and kind.has_graphs else contextlib.nullcontext():
        yield


@pytest.fixture(scope="session", autouse=True)
def heap() -> Iterator[None]:
    with frozen_heap():
        yield


@pytest.fixture(scope="module", autouse=True)
def strict_answers() -> Iterator[None]:
    with checked_answers():
        yield


@pytest.fixture(scope="session", autouse=True)
def watch() -> Iterator[Watch]:
    """Watch everything that reads in the engines of this process."""
    with watched_reads() as watch:
        yield watch


@pytest.fixture(autouse=True)
def reads_change_nothing(watch: Watch) -> Iterator[None]:
    """Fail a test in which, or before which, something that reads has changed the model's tensors."""
    yield
    changed, watch.changed = watch.changed, []
    assert not changed


@pytest.fixture(scope="session")
def bundled() -> Path:
    return bundled_model_path()


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the narrow copy of it, for all that asks for no text that makes sense."""
    return write_narrow_model(tmp_path_factory.mktemp("models") / NAME)


@pytest.fixture(scope="module")
def reference(narrow: Path) -> Any:
    """Return transformers' own float32 model."""
    return load_reference_model(narrow)


@pytest.fixture(scope="session")
def bundled_server(request: pytest.FixtureRequest) -> Server:
    """Serve the bundled model over HTTP, in processes of its own; modules share it."""
    return shared(request, Server(arguments=["--max-model-len", "1024"]))


@pytest.fixture(scope="session")
def narrow_server(request: pytest.FixtureRequest, narrow: Path) -> Server:
    """Serve the narrow model, likewise."""
    arguments = ["--served-model-name", NAME, "--max-model-len", "1024"]
    return shared(request, Server(str(narrow), arguments=arguments))


@pytest.fixture(scope="session")
def shared_live(
    request: pytest.FixtureRequest, narrow: Path, tmp_path_factory: pytest.TempPathFactory
) -> Live:
    """Serve it in this process, with little room for results; modules share it."""
    limits = {"inline_tensor_bytes": 2**18, "max_capture_bytes_per_request": 2**23}
    return shared(request, live_server_in_a_thread(narrow, tmp_path_factory.mktemp("results"), **limits))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(shared_live: Live) -> AsyncIterator[Live]:
    """Give it to a module; in the end nothing of any request is held."""
    async with shared_live.in_this_loop() as live:
        yield live
        assert set((await live.held()).values()) == {0}
        assert not live.engine.engine._background  # noqa: SLF001 - nothing else shows them


@pytest.fixture(scope="session")
def keyed_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> KeyedServer:
    """Serve the bundled model, whose answers follow grammars and whose steps cost, to tenants with keys."""
    return shared(request, serving_keys(tmp_path_factory.mktemp("keyed")))


@pytest.fixture(scope="session")
def chunked_engine(request: pytest.FixtureRequest, narrow: Path) -> Engine:
    """Run it in float32 with so little memory that requests are chunked and preempted; modules share it."""
    engine = Engine(
        narrow,
        dtype="float32",
        max_num_batched_tokens=32,
        max_num_seqs=8,
        max_model_len=256,
        block_size=32,
        num_gpu_blocks_override=9,
    )
    return shared(request, contextlib.closing(engine))


@pytest.fixture(scope="session")
def renamed_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny model of ``renamed_model``."""
    return write_checkpoint("llama", tmp_path_factory.mktemp("renamed") / "llama")


@pytest.fixture(scope="session")
def renamed_model(request: pytest.FixtureRequest, renamed_checkpoint: Path) -> VLLM:
    """Run it in this process, for traces; modules share it."""
    return shared(request, renamed_engine(renamed_checkpoint))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let a server or an engine live for no longer than it must."""
    for name in SHARED_FIXTURES:
        bring_together(items, uses(name))


@pytest.hookimpl(trylast=True)  # behind the fixtures of its module, which may still ask it something
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End what is shared with the last test that uses it: others may come that want the memory."""
    for name, stop in item.session.stash.get(SHARED, {}).items():
        if is_last(item, uses(name)):
            stop()
