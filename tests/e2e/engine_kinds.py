"""Kinds of vLLM's engine, by scheduling, speculation and stages.

``python -m tests.e2e.engine_kinds KIND ARGUMENTS...`` runs pytest in a process whose engines of ``harness``
and ``traces`` are of that kind.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

from tests.e2e.draft_checkpoints import eagle, first_layer, mtp

Speculation = Literal["ngram", "self_draft", "small_draft", "eagle", "eagle3", "mtp"]
_NAME: Final = re.compile(
    r"(?P<scheduling>sync|async)"
    rf"(-((?P<speculation>{'|'.join(get_args(Speculation))})|(?P<stages>[2-9])_stages))?(?P<graphs>-graphs)?"
)
KIND: Final = "ENGINE_KIND"
"""The variable that names the kind of a process's engines, such as ``async-small_draft``."""
NUM_DRAFTS: Final = 3
_NUM_MTP_LAYERS: Final = "num_nextn_predict_layers"


@dataclasses.dataclass(frozen=True, slots=True)
class EngineKind:
    """One kind of engine.

    Attributes:
        is_async: Whether a step is scheduled while the one before it runs.
        speculation: What proposes drafts, if anything: ``ngram`` repeats the text, ``self_draft`` is the
            model itself (the first layer of one with several kinds of layers, of which vLLM allows no
            draft), whose drafts are accepted, ``small_draft`` its first layer, whose drafts are mostly
            refused; ``eagle`` and ``eagle3`` are random, and read the model's hidden states; ``mtp`` is the
            model's own layer for it, or, where it has none, one that is added to a Llama model.
        num_stages: Number of pipeline stages.
        has_graphs: Whether decode steps are full CUDA graphs, on ``GraphedCpuPlatform``.
    """

    is_async: bool
    speculation: Speculation | None = None
    num_stages: int = 1
    has_graphs: bool = False

    def __str__(self) -> str:
        scheduling = "async" if self.is_async else "sync"
        stages = [f"{self.num_stages}_stages"] if self.num_stages > 1 else []
        graphs = ["graphs"] if self.has_graphs else []
        return "-".join([scheduling, *([self.speculation] if self.speculation else []), *stages, *graphs])

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
            is_async=match["scheduling"] == "async",
            speculation=cast(Speculation | None, match["speculation"]),
            num_stages=int(match["stages"] or 1),
            has_graphs=match["graphs"] is not None,
        )

    def options(self, model: Path) -> dict[str, Any]:
        """Return vLLM's engine arguments for it, beside those of the model."""
        found: dict[str, Any] = {"async_scheduling": self.is_async}
        if self.has_graphs:
            mode = {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24],
            }
            found |= {"enforce_eager": False, "compilation_config": mode}
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
            "async",
            "async-graphs",
            "async-small_draft-graphs",
            "async-self_draft",
            "async-small_draft",
            "async-eagle",
            "async-eagle3",
            "async-mtp",
            "async-2_stages",
            "sync",
            "sync-ngram",
        ),
    )
)
"""The default, and others that differ from it in what drafts, in stages, in scheduling, or in graphs.

N-grams are looked up on the host, which does not know the last token in time.
"""
DEFAULT: Final = EngineKind(is_async=True)


def _has_several_kinds_of_layers(model: Path) -> bool:
    return len(set(_config(model).get("layer_types") or ())) > 1


def _has_mtp(model: Path) -> bool:
    return bool(_config(model).get(_NUM_MTP_LAYERS))


def _config(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model / "config.json").read_text())
    return found


def environment(kind: EngineKind) -> dict[str, str]:
    """Return the variables of a process whose engines are of a kind."""
    # With stages, vLLM otherwise wants a NUMA node for each.
    return {KIND: str(kind)} | ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if kind.num_stages > 1 else {})


def kind_of_process() -> EngineKind | None:
    """Return the kind of which this process was started, if of any."""
    name = os.environ.get(KIND)
    return None if name is None else EngineKind.named(name)


def options_of_process(model: Path | str) -> dict[str, Any]:
    """Return the engine arguments of the kind of which this process was started, if of any."""
    kind = kind_of_process()
    return {} if kind is None else kind.options(Path(model))


def main(name: str, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "--numprocesses", "0", *arguments]
    os.execve(sys.executable, command, {**os.environ, **environment(EngineKind.named(name))})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
