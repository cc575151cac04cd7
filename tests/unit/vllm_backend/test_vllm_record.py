"""Known versions of vLLM that are not installed have the names of ``vllm_names``, by their records."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnsight_engine.vllm_backend.steps.vllm_names import USED_NAMES
from nnsight_engine.vllm_backend.versions.check import COMPARED_VERSIONS, KNOWN_VERSIONS
from nnsight_engine.vllm_backend.versions.differences import differences
from nnsight_engine.vllm_backend.versions.sources import VLLMSources
from tests.unit.vllm_backend.vllm_copies import changed_copy, installed_folder
from tests.unit.vllm_backend.vllm_record import COMMAND, FOLDER, record, unpacked

RECORDS = {path.stem: path for path in FOLDER.glob("*.txt")}


def test_versions_that_were_only_compared_have_a_record() -> None:
    assert {version.rpartition(".")[0] for version in RECORDS} == set(COMPARED_VERSIONS)
    installed = VLLMSources(installed_folder()).version.rpartition(".")[0]
    assert {installed, *COMPARED_VERSIONS} == set(KNOWN_VERSIONS)


@pytest.mark.parametrize("version", RECORDS)
def test_all_names_are_in_the_record(version: str, tmp_path: Path) -> None:
    sources = unpacked(RECORDS[version].read_text(encoding="utf-8"), tmp_path)
    assert sources.version == version
    found = [str(one) for one in differences(sources, USED_NAMES)]
    assert found == [], f"the list has names that the record lacks or has differently: {COMMAND} {version}"


def test_a_record_shows_what_the_sources_show(tmp_path: Path) -> None:
    folder = tmp_path / "sources"
    folder.mkdir()
    sources = changed_copy(
        folder,
        ("vllm/v1/core/sched/output.py", "    total_num_scheduled_tokens: int\n", ""),
        ("vllm/v1/core/block_pool.py", "class BlockPool:", "class Pool:"),
        (
            "vllm/v1/core/kv_cache_manager.py",
            "    def evict_blocks(self, block_ids: set[int])",
            "    def evict_blocks(self, ids: set[int])",
        ),
        (
            "vllm/engine/protocol.py",
            "class EngineClient(ABC):\n",
            "class EngineClient(ABC):\n    @abstractmethod\n    def rest(self) -> None: ...\n\n",
        ),
    )
    expected = differences(sources, USED_NAMES)
    assert len(expected) == 5
    assert differences(unpacked(record(sources), tmp_path / "record"), USED_NAMES) == expected
