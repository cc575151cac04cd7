"""The list of vLLM's names that the engine depends on: compared with vLLM's sources and the engine's code."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import pytest

import app.engine
import nnsight_engine.vllm_backend
from tests.unit.vllm_backend.vllm_copies import changed_copy, installed_folder
from tests.unit.vllm_backend.vllm_names import USED_NAMES, UsedNames
from tests.unit.vllm_backend.vllm_record import COMMAND, FOLDER, record, unpacked
from tests.unit.vllm_backend.vllm_sources import VLLMSources, differences, signature_changes

PACKAGES = (nnsight_engine.vllm_backend, app.engine)
"""The packages that know vLLM."""


def test_all_names_are_as_the_engine_needs_them() -> None:
    # VLLM_SOURCES: a folder with another version, such as an unpacked wheel.
    folder = Path(os.environ.get("VLLM_SOURCES") or installed_folder())
    sources = VLLMSources(folder)
    assert sources.version
    assert [str(one) for one in differences(sources, USED_NAMES)] == []


SCHEDULER: Final = "v1/core/sched/scheduler.py"
ADD_REQUEST: Final = "    def add_request(self, request: Request)"
CHANGES: Final = (
    (
        "v1/worker/gpu/model_runner.py",
        "    def sample(\n",
        "    def draw(\n",
        ["GPUModelRunner.sample: the name is gone"],
    ),
    (  # one of several classes
        "v1/worker/cpu_worker.py",
        "    def init_device(self)",
        "    def init_device(self, stream: int)",
        ["CPUWorker.init_device: new required parameter `stream`"],
    ),
    (  # it remains in an interface only
        SCHEDULER,
        "    def finish_requests(\n",
        "    def close_requests(\n",
        ["Scheduler.finish_requests: it has no implementation any more"],
    ),
    (
        SCHEDULER,
        ADD_REQUEST,
        "    def add_request(self, request: Request, place: int)",
        ["Scheduler.add_request: new required parameter `place`"],
    ),
    (
        SCHEDULER,
        ADD_REQUEST,
        "    def add_request(self, request: Request, place: int = 0)",
        ["Scheduler.add_request: new parameter `place`, which the override does not accept"],
    ),
    (
        "v1/core/kv_cache_manager.py",
        "    def evict_blocks(self, block_ids: set[int])",
        "    def evict_blocks(self, ids: set[int])",
        [
            "KVCacheManager.evict_blocks: parameter `block_ids` is gone",
            "KVCacheManager.evict_blocks: new required parameter `ids`",
        ],
    ),
    (
        "v1/core/sched/output.py",
        "    total_num_scheduled_tokens: int\n",
        "",
        ["SchedulerOutput.total_num_scheduled_tokens: the name is gone"],
    ),
    (
        SCHEDULER,
        "        self.need_mamba_block_aligned_split = (",
        "        is_split = (",
        ["Scheduler.need_mamba_block_aligned_split: the name is gone"],
    ),
    (
        "engine/protocol.py",
        "class EngineClient(ABC):\n",
        "class EngineClient(ABC):\n    @abstractmethod\n    def rest(self) -> None: ...\n\n",
        ["AsyncLLM.rest: a new abstract method"],
    ),
    ("v1/core/block_pool.py", "class BlockPool:", "class Pool:", ["BlockPool: the class is gone"]),
)


@pytest.mark.parametrize(("path", "old", "new", "expected"), CHANGES)
def test_a_change_is_named_as_by_a_record(
    tmp_path: Path, path: str, old: str, new: str, expected: list[str]
) -> None:
    folder = tmp_path / "sources"
    folder.mkdir()
    sources = changed_copy(folder, (f"vllm/{path}", old, new))
    classes = {re.split("[.:]", line)[0] for line in expected}
    used = [one for one in USED_NAMES if classes & {owner.partition(":")[2] for owner in one.owners}]
    found = differences(sources, used)
    assert [f"{one.name.partition(':')[2]}: {one.change}" for one in found] == expected
    assert differences(unpacked(record(sources, used), tmp_path / "record"), used) == found


LATER: Final = {
    "0.33.0": [
        "vllm.v1.outputs:AsyncModelRunnerOutput.get_kv_connector_output (overridden): a new abstract method"
    ]
}
"""What has changed in later versions, by their records: what an upgrade has to follow."""


def test_what_later_versions_change_is_known_from_their_records(tmp_path: Path) -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == LATER.keys()
    for version, changes in LATER.items():
        text = (FOLDER / f"{version}.txt").read_text(encoding="utf-8")
        sources = unpacked(text, tmp_path / version)
        assert sources.version == version
        found = [str(one) for one in differences(sources, USED_NAMES)]
        assert found == changes, f"if the record lacks names of the list: {COMMAND} {version}"


@pytest.mark.parametrize(
    ("expected", "actual", "changes"),
    [
        ("a, b=None", "a, b=None, c=1", []),
        ("a, *, b", "a, c=1, b=2", []),
        ("a, b", "*values", []),
        ("*, a", "**values", []),
        ("a, b", "b, a", ["parameter `a` has moved", "parameter `b` has moved"]),
        ("a", "*, a", ["parameter `a` has moved"]),
        ("a, b=None", "a, b", ["parameter `b` is required now"]),
        ("a, *, b", "a", ["parameter `b` is gone"]),
    ],
)
def test_calls_stay_valid(expected: str, actual: str, changes: list[str]) -> None:
    assert list(signature_changes(_arguments(expected), _arguments(actual), is_overridden=False)) == changes


def test_each_override_is_listed_and_accepts_what_the_list_says() -> None:
    num_overrides = 0
    for cls in _extended_classes():
        listed = {name: signature for used in _entries(cls) for name, signature in used.overridden.items()}
        implemented = {name for used in _entries(cls) for name in used.implemented}
        assert implemented <= set(dir(cls)), cls
        for name, function in _overrides(cls):
            if name in implemented:
                continue
            assert name in listed, f"{function.__qualname__} overrides a method that vllm_names does not list"
            wanted = _arguments(listed[name])
            signature = inspect.signature(function)
            signature.bind(
                None,
                *(one.arg for one in wanted.args),
                **{one.arg: None for one in wanted.kwonlyargs},
                **({"another": None} if wanted.kwarg is not None else {}),
            )
            num_overrides += 1
    assert num_overrides > 20


def test_each_import_is_listed() -> None:
    listed = {
        (owner.partition(":")[0], name)
        for used in USED_NAMES
        for owner in used.owners
        for name in ([owner.partition(":")[2]] if ":" in owner else [*used.read, *used.called])
    }
    imported = {
        (node.module, name.name): path
        for package in (app, nnsight_engine)
        for path in Path(package.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
        for name in node.names
    }
    assert len(imported) > 40
    assert {one: path.name for one, path in imported.items() if one not in listed} == {}


def _arguments(signature: str) -> ast.arguments:
    (function,) = ast.parse(f"def f({signature}): ...").body
    assert isinstance(function, ast.FunctionDef)
    return function.args


def _extended_classes() -> list[type]:
    """Return the project's classes that derive from a class of vLLM."""
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner  # noqa: PLC0415 - slow
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # noqa: PLC0415 - slow

    from nnsight_engine.vllm_backend.steps.runner import RunnerMixin  # noqa: PLC0415 - slow

    runners: list[Any] = [GPUModelRunner, CPUModelRunner]
    found = [type(f"Intervention{theirs.__name__}", (RunnerMixin, theirs), {}) for theirs in runners]
    for package in PACKAGES:
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(info.name)
            found += [
                one
                for one in vars(module).values()
                if isinstance(one, type) and one.__module__ == info.name and _theirs(one)
            ]
    assert len(found) > 8
    return found


def _theirs(cls: type) -> list[tuple[str, str]]:
    """Return the module and name of the classes of vLLM from which a class derives, nearest first."""
    return [(one.__module__, one.__qualname__) for one in cls.__mro__ if _is_theirs(one)]


def _is_theirs(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "vllm"


def _ours(cls: type) -> list[type]:
    names = {package.__name__.partition(".")[0] for package in PACKAGES}
    return [one for one in cls.__mro__ if one.__module__.partition(".")[0] in names]


def _entries(cls: type) -> list[UsedNames]:
    owners = {f"{module}:{name}" for module, name in _theirs(cls)}
    return [used for used in USED_NAMES if owners & set(used.owners)]


def _overrides(cls: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield the methods of the project's that hide one of vLLM's."""
    for one in _ours(cls):
        for name, value in vars(one).items():
            # A function from elsewhere was added by a decorator or a metaclass.
            is_own = isinstance(value, FunctionType) and value.__module__ == one.__module__
            if is_own and any(name in vars(base) for base in cls.__mro__ if _is_theirs(base)):
                yield name, value
