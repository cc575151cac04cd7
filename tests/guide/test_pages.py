"""Every code block of the documentation runs, or says why it does not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import PROJECT
from tests.guide.pages import RUN, SHOWN, WITH_ENGINES, Page, blocks, pages, run_page
from tests.guide.served import Servers
from tests.waiting import wait_for

MOST_NOT_RUN = 35
RUNNABLE = [
    path
    for path in pages()
    if path not in WITH_ENGINES
    if any(block.language in RUN and not block.reason for block in blocks(path))
]
FIRST_READ = ("README.md", "docs/tutorial.md", "docs/interventions.md", "docs/tracing.md")
"""Pages whose blocks every change runs; those of the others are heavy."""


def test_every_block_is_of_a_language_that_is_run_or_shown() -> None:
    for path in pages():
        for block in blocks(path):
            assert block.language in RUN | SHOWN, f"{block}: {block.language!r} is neither run nor shown"


def test_every_fence_is_one_that_is_found() -> None:
    for path in pages():
        text = path.read_text(encoding="utf-8")
        checks = len(re.findall("^ *<!-- check:", text, re.MULTILINE))
        fences = len(re.findall("^ *```", text, re.MULTILINE))
        assert fences == 2 * (len(list(blocks(path))) - checks), path


def test_blocks_that_are_not_run_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints them, so that each run shows what it left out."""
    reasons = {str(block): block.reason for path in pages() for block in blocks(path) if block.reason}
    listed = "".join(f"  {where}: {why}\n" for where, why in reasons.items())
    with capsys.disabled():
        sys.stdout.write(f"\n{len(reasons)} blocks are not run:\n{listed}")
    assert all(len(reason.split()) > 2 for reason in reasons.values())
    assert len(reasons) <= MOST_NOT_RUN, "a new block should run"


@pytest.mark.e2e
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=name, marks=() if name in FIRST_READ else pytest.mark.heavy)
        for path, name in ((path, str(path.relative_to(PROJECT))) for path in RUNNABLE)
    ],
)
def test_a_page_runs(
    path: Path, guide_servers: Servers, smollm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = guide_servers.url(smollm_folder)
    last_example = f"{url}/v1/dictionaries?name=example-topics"  # they are stored beside the first requests
    wait_for(lambda: httpx.get(last_example, timeout=60).json()["data"])
    run_page(path, Page(url, smollm_folder, tmp_path))
