"""vLLM by itself generates the same on engines of all kinds, so what differs elsewhere is this project's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.check_process import report_of
from tests.e2e.engine_kinds import KINDS, V1_SYNC, V2_SYNC, EngineKind, environment, prepared
from tests.e2e.plain_kinds_check import MODEL, NUM_TOKENS, PROMPTS
from tests.families.checkpoints import write_checkpoint

pytestmark = pytest.mark.e2e


def generated(folder: Path, kinds: tuple[EngineKind, ...]) -> dict[EngineKind, dict[str, Any]]:
    """Return what engines of some kinds generate, by kind."""
    write_checkpoint("llama", folder / MODEL)
    found: dict[EngineKind, dict[str, Any]] = {}
    for first in (V1_SYNC, V2_SYNC):
        names = [str(kind) for kind in kinds if kind.runner == first.runner]
        report = report_of("tests.e2e.plain_kinds_check", folder, names, environment=environment(first))
        found |= {EngineKind.named(name): entry for name, entry in report.items()}
    return found


def test_names_are_those_of_what_vllm_allows() -> None:
    assert [EngineKind.named(str(kind)) for kind in KINDS] == list(KINDS)
    for name in ("v1-async-ngram", "v3-sync", "v1-sync-2_stages-eagle", "v1"):
        with pytest.raises(ValueError, match="kind must match"):
            EngineKind.named(name)


def test_a_process_starts_engines_of_its_own_runner_only() -> None:
    with (
        pytest.raises(ValueError, match="runner v1, got v2-sync"),
        prepared(V2_SYNC),
    ):
        pass


@pytest.mark.heavy
def test_vllm_generates_the_same_on_all_kinds(tmp_path: Path) -> None:
    # vLLM alone does not run stages on a CPU: it allocates no memory for what they receive.
    found = generated(tmp_path, tuple(kind for kind in KINDS if kind.num_stages == 1))
    for kind, entry in found.items():
        assert entry["tokens"] == found[V1_SYNC]["tokens"], kind
        assert (entry["is_v2"], entry["is_async"]) == (kind.runner == "v2", kind.is_async)
        drafted, accepted = entry.get("drafted", 0), entry.get("accepted", 0)
        assert (drafted > 0) == (kind.speculation is not None), kind
        if kind.speculation == "self_draft":
            # A text ends within its last drafts.
            assert accepted >= len(PROMPTS) * (NUM_TOKENS - 1) / 2, kind
        elif kind.speculation == "small_draft":
            assert accepted < drafted / 2, kind
