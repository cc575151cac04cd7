"""Each attribute that the engine reads of an object of vLLM's is in the list of names.

An object's class is known if it is an argument annotated with a class of vLLM, or a variable or attribute
with the name of a part of vLLM's configuration or of ``NAMED``. Other objects are not checked.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

import app.engine
import nnsight_engine.vllm_backend
from tests.unit.vllm_backend.vllm_copies import installed_folder
from tests.unit.vllm_backend.vllm_names import USED_NAMES
from tests.unit.vllm_backend.vllm_sources import SourceName, VLLMSources

NAMED: Final = {
    "attention": ("vllm.model_executor.layers.attention:Attention",),
    "block_pool": ("vllm.v1.core.block_pool:BlockPool",),
    "blocks": ("vllm.v1.core.kv_cache_utils:KVCacheBlock",),
    "config": ("vllm.config:VllmConfig",),
    "drafts": ("vllm.config:SpeculativeConfig",),
    "impl": ("vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl",),
    "input_batch": ("vllm.v1.worker.gpu.input_batch:InputBatch",),
    "kv_cache_config": ("vllm.v1.kv_cache_interface:KVCacheConfig",),
    "kv_cache_manager": ("vllm.v1.core.kv_cache_manager:KVCacheManager",),
    "parallel": ("vllm.config:ParallelConfig",),
    "pooler": ("vllm.config:PoolerConfig",),
    "pooling_params": ("vllm.pooling_params:PoolingParams",),
    "runner": ("vllm.v1.worker.gpu.model_runner:GPUModelRunner",),
    "sampling_params": ("vllm.sampling_params:SamplingParams",),
    "scheduled": ("vllm.v1.core.sched.output:SchedulerOutput",),
    "scheduled_cached_reqs": ("vllm.v1.core.sched.output:CachedRequestData",),
    "scheduler_output": ("vllm.v1.core.sched.output:SchedulerOutput",),
    "vllm_config": ("vllm.config:VllmConfig",),
}  # fmt: skip
Classes = Mapping[str, tuple[SourceName, ...]]
"""Classes of variables and attributes by name."""


class Reads:
    """The reads of vLLM's attributes in modules."""

    def __init__(self, sources: VLLMSources) -> None:
        self._sources = sources
        self._imported: dict[str, tuple[str, str]] = {}
        config = self._class("vllm.config:VllmConfig")
        parts = {
            node.target.id: self._class(f"{config.module}:{name.id}")
            for node in ast.walk(config.node or ast.Pass())
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            for name in ast.walk(node.annotation)
            if isinstance(name, ast.Name) and name.id.endswith("Config")
        }
        assert {"cache_config", "model_config", "speculative_config"} <= set(parts)
        named = {name: tuple(map(self._class, owners)) for name, owners in NAMED.items()}
        self._classes: Classes = {**{name: (one,) for name, one in parts.items()}, **named}

    def listed(self) -> dict[ast.AST | None, set[str]]:
        """Return the names that are listed, by class."""
        found: dict[ast.AST | None, set[str]] = {}
        for used in USED_NAMES:
            for owner in used.owners:
                if ":" in owner:
                    names = (*used.read, *used.called, *used.overridden, *used.implemented)
                    found.setdefault(self._class(owner).node, set()).update(names)
        return found

    def of(self, text: str) -> Iterator[tuple[int, str, tuple[SourceName, ...]]]:
        """Yield line, attribute and classes that have it, for each read in a module."""
        tree = ast.parse(text)
        self._imported = {
            name.asname or name.name: (node.module or "", name.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm"
            for name in node.names
        }
        yield from self._within(tree, self._classes)

    def _within(self, node: ast.AST, known: Classes) -> Iterator[tuple[int, str, tuple[SourceName, ...]]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            known = {**known, **self._local(node, known)}
        for value, attribute, line in _read(node):
            classes = known.get(_name(value), ())
            have = tuple(one for one in classes if attribute in self._sources.members(one))
            if have:
                yield line, attribute, have
        for child in ast.iter_child_nodes(node):
            yield from self._within(child, known)

    def _local(self, function: ast.FunctionDef | ast.AsyncFunctionDef, known: Classes) -> Classes:
        """Return the classes of a function's arguments, and of variables that are parts of known objects."""
        found: dict[str, tuple[SourceName, ...]] = {}
        for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
            annotation = one.annotation
            if isinstance(annotation, ast.BinOp):  # ``X | None``
                annotation = annotation.left
            if isinstance(annotation, ast.Name) and annotation.id in self._imported:
                cls = self._sources.find(*self._imported[annotation.id])
                # Fields of request models are not listed.
                found[one.arg] = () if cls is None or cls.module.endswith(".protocol") else (cls,)
            elif annotation is not None and not (isinstance(annotation, ast.Name) and annotation.id == "Any"):
                found[one.arg] = ()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
                for target in node.targets:
                    if isinstance(target, ast.Name) and node.value.attr in known:
                        found[target.id] = known[node.value.attr]
        return found

    def _class(self, owner: str) -> SourceName:
        module, _, name = owner.partition(":")
        found = self._sources.find(module, name)
        assert found is not None, owner
        return found


def _read(node: ast.AST) -> Iterator[tuple[ast.expr, str, int]]:
    """Yield object, attribute and line if a node reads an attribute, also by ``getattr`` or ``hasattr``."""
    if isinstance(node, ast.Attribute):
        yield node.value, node.attr, node.lineno
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr"}:
        value, name = node.args[:2]
        if isinstance(name, ast.Constant):
            yield value, str(name.value), node.lineno


def _name(value: ast.expr) -> str:
    """Return the last name of an expression: ``b`` of ``a.b`` and of ``a.b[0]``."""
    if isinstance(value, ast.Subscript):
        value = value.value
    return value.id if isinstance(value, ast.Name) else getattr(value, "attr", "")


@pytest.fixture(scope="module")
def reads() -> Reads:
    return Reads(VLLMSources(installed_folder()))


def _unlisted(reads: Reads, text: str) -> list[str]:
    listed = reads.listed()
    return [
        f"line {line} reads {attribute} of {module}:{node.name}"
        for line, attribute, classes in reads.of(text)
        if not any(attribute in listed.get(one.node, ()) for one in classes)
        for module, node in [(classes[0].module, classes[0].node)]
        if isinstance(node, ast.ClassDef)
    ]


def test_each_attribute_that_is_read_is_listed(reads: Reads) -> None:
    num_reads = 0
    for package in (app.engine, nnsight_engine.vllm_backend):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            num_reads += len(list(reads.of(text)))
            assert not _unlisted(reads, text), path
    assert num_reads > 300


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("self.vllm_config.cache_config.swap_space", []),  # not an attribute of this version
        ("self.vllm_config.cache_config.num_gpu_blocks", ["num_gpu_blocks of vllm.config.cache:CacheConfig"]),
        ("def f(self):\n one = self.cache_config\n one.num_gpu_blocks", ["num_gpu_blocks of"]),
        (
            "from vllm.v1.request import Request\ndef f(one: Request | None):\n one.arrival_time",
            ["arrival_time of vllm.v1.request:Request"],
        ),
        ("getattr(attention.impl, 'kv_cache_dtype', None)", ["kv_cache_dtype of"]),
    ],
)
def test_an_attribute_that_is_not_listed_is_found(reads: Reads, text: str, found: list[str]) -> None:
    unlisted = _unlisted(reads, text)
    assert len(unlisted) == len(found)
    assert all(part in line for part, line in zip(found, unlisted, strict=True))
