"""Kinds of vLLM's engine, by runner, scheduling, speculation and stages, and what each needs on a CPU.

An engine with runner V1 of any kind runs in a test's process, inside ``prepared``. vLLM reads once whether a
process has runner V2, so its engines run in processes that ``environment`` is given to; they and their
children load the plugin ``kind_platform``.

``python -m tests.e2e.engine_kinds KIND ARGUMENTS...`` runs pytest in such a process; engines of
``harness`` and ``traces`` are of that kind then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

from vllm.platforms import current_platform

from tests.e2e.draft_checkpoints import eagle, first_layer, mtp
from tests.e2e.kind_platform import KIND, KindPlatform, is_v2

Runner = Literal["v1", "v2"]
Speculation = Literal["ngram", "self_draft", "small_draft", "eagle", "eagle3", "mtp"]
_NAME: Final = re.compile(
    r"(?P<runner>v[12])-(?P<scheduling>sync|async)"
    rf"(-((?P<speculation>{'|'.join(get_args(Speculation))})|(?P<stages>[2-9])_stages))?"
)
NUM_DRAFTS: Final = 3
_NUM_MTP_LAYERS: Final = "num_nextn_predict_layers"
_PROJECT: Final = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True, slots=True)
class EngineKind:
    """One kind of engine.

    Attributes:
        runner: vLLM's model runner.
        is_async: Whether a step is scheduled while the one before it runs.
        speculation: What proposes drafts, if anything: ``ngram`` repeats the text, ``self_draft`` is the
            model itself (the first layer of one with several kinds of layers, of which vLLM allows no
            draft), whose drafts are accepted, ``small_draft`` its first layer, whose drafts are mostly
            refused; ``eagle`` and ``eagle3`` are random, and read the model's hidden states; ``mtp`` is the
            model's own layer for it, or, where it has none, one that is added to a Llama model.
        num_stages: Number of pipeline stages.
    """

    runner: Runner
    is_async: bool
    speculation: Speculation | None = None
    num_stages: int = 1

    def __str__(self) -> str:
        scheduling = "async" if self.is_async else "sync"
        stages = [f"{self.num_stages}_stages"] if self.num_stages > 1 else []
        return "-".join([self.runner, scheduling, *([self.speculation] if self.speculation else []), *stages])

    @staticmethod
    def named(name: str) -> EngineKind:
        """Return the kind of a name.

        Raises:
            ValueError: vLLM 0.32 allows no such kind.
        """
        match = _NAME.fullmatch(name)
        if match is None or (match["scheduling"], match["speculation"]) == ("async", "ngram"):
            raise ValueError(f"kind must match {_NAME.pattern}, and no n-grams if async, got {name!r}")
        return EngineKind(
            cast(Runner, match["runner"]),
            is_async=match["scheduling"] == "async",
            speculation=cast(Speculation | None, match["speculation"]),
            num_stages=int(match["stages"] or 1),
        )

    def options(self, model: Path) -> dict[str, Any]:
        """Return vLLM's engine arguments for it, beside those of the model."""
        found: dict[str, Any] = {"async_scheduling": self.is_async}
        if self.num_stages > 1:
            found["pipeline_parallel_size"] = self.num_stages
        if self.speculation == "ngram":
            found["speculative_config"] = {
                "method": "ngram",
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 3,
                "num_speculative_tokens": NUM_DRAFTS,
            }
        elif self.speculation in {"eagle", "eagle3"}:
            found["speculative_config"] = {
                "method": self.speculation,
                "model": str(eagle(model, self.speculation)),
                "num_speculative_tokens": NUM_DRAFTS,
            }
        elif self.speculation == "mtp":
            found["speculative_config"] = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
            if not _has_mtp(model):
                found["speculative_config"]["model"] = str(mtp(model))
                found["hf_overrides"] = {_NUM_MTP_LAYERS: 1}
        elif self.speculation is not None:
            is_whole = self.speculation == "self_draft" and not _has_several_kinds_of_layers(model)
            draft = model if is_whole else first_layer(model)
            found["speculative_config"] = {
                "method": "draft_model",
                "model": str(draft),
                "num_speculative_tokens": NUM_DRAFTS,
            }
        return found


KINDS: Final = tuple(
    map(
        EngineKind.named,
        (
            "v1-sync",
            "v1-sync-ngram",
            "v1-sync-self_draft",
            "v1-async-small_draft",
            "v1-async-eagle",
            "v1-sync-eagle3",
            "v1-async-mtp",
            "v1-sync-2_stages",
            "v2-async",
            "v2-sync-ngram",
            "v2-async-self_draft",
            "v2-sync-small_draft",
            "v2-sync-eagle",
            "v2-async-eagle3",
            "v2-sync-mtp",
            "v2-async-2_stages",
        ),
    )
)
"""Kinds that meet pairwise: each two of runner, scheduling, and drafts or stages, as far as vLLM 0.32 allows.

N-grams are looked up on the host, which does not know the last token in time. With stages there are no
drafts, and on V1 no asynchronous scheduling.
"""
V1_SYNC: Final = EngineKind("v1", is_async=False)
"""The kind that others are compared with."""
V2_SYNC: Final = EngineKind("v2", is_async=False)


def _has_several_kinds_of_layers(model: Path) -> bool:
    return len(set(_config(model).get("layer_types") or ())) > 1


def _has_mtp(model: Path) -> bool:
    return bool(_config(model).get(_NUM_MTP_LAYERS))


def _config(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model / "config.json").read_text())
    return found


def environment(kind: EngineKind) -> dict[str, str]:
    """Return the variables of a process whose engines are of a kind, or of others with its runner."""
    path = [str(_PROJECT / "tests/e2e/kind_plugin"), str(_PROJECT), os.environ.get("PYTHONPATH", "")]
    found = {
        KIND: str(kind),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "VLLM_USE_V2_MODEL_RUNNER": str(int(kind.runner == "v2")),
    }
    if kind.num_stages > 1:
        found["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else vLLM wants a NUMA node for each stage
    return found


def kind_of_process() -> EngineKind | None:
    """Return the kind of which this process was started, if of any."""
    name = os.environ.get(KIND)
    return None if name is None else EngineKind.named(name)


def options_of_process(model: Path | str) -> dict[str, Any]:
    """Return the engine arguments of the kind of which this process was started, if of any."""
    kind = kind_of_process()
    return {} if kind is None else kind.options(Path(model))


@contextlib.contextmanager
def prepared(kind: EngineKind) -> Iterator[None]:
    """Have this process start engines of a kind.

    Raises:
        ValueError: Its runner is not the one of the process, which vLLM reads once.
    """
    runner = "v2" if is_v2() else "v1"
    if kind.runner != runner:
        raise ValueError(f"engines of this process have runner {runner}, got {kind}; start another process")
    before = type(current_platform)
    current_platform.__class__ = KindPlatform  # vLLM's modules share the instance
    try:
        yield
    finally:
        current_platform.__class__ = before


def main(name: str, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "--numprocesses", "0", *arguments]
    os.execve(sys.executable, command, {**os.environ, **environment(EngineKind.named(name))})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
