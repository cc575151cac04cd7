"""Sources of prompts."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nnsight_engine.datasets.manifest import PromptSourceError, SettingsError, SourceFile
from nnsight_engine.datasets.prompts import Prompt, PromptDigest, PromptSource

LINES = (
    '{"text": "a\\u00e9", "other": 1}\n\n{"prompt": "b"}\n{"prompt": [1, 2]}\n'
    '{"messages": [{"role": "user", "content": "c"}]}\n{"token_ids": []}'
)
PROMPTS = [
    Prompt(text="aé"),
    Prompt(text="b"),
    Prompt(token_ids=[1, 2]),
    Prompt(messages=[{"role": "user", "content": "c"}]),
    Prompt(token_ids=[]),
]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(LINES, encoding="utf-8")
    source = PromptSource(path)
    assert list(source) == list(source) == PROMPTS
    assert source.identity.files == [SourceFile("prompts.jsonl", len(LINES.encode()))]
    with gzip.open(tmp_path / "more.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(LINES)
    assert list(PromptSource(tmp_path / "more.jsonl.gz")) == PROMPTS
    assert list(PromptSource(f"{tmp_path}/*.jsonl*")) == PROMPTS * 2
    with fsspec.open("memory://prompts/x.json", "w") as file:
        file.write(LINES)
    assert list(PromptSource("memory://prompts/x.json")) == PROMPTS


def test_parquet(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "c"}], None]
    pq.write_table(pa.table({"text": [None, "b"], "messages": messages, "n": [1, 2]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"token_ids": [[1, 2], [3]]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": ["x", None]}), tmp_path / "c.parquet")
    assert list(PromptSource(tmp_path / "a.parquet")) == [PROMPTS[3], PROMPTS[1]]
    assert list(PromptSource(tmp_path / "b.parquet")) == [Prompt(token_ids=[1, 2]), Prompt(token_ids=[3])]
    with pytest.raises(PromptSourceError, match=r"c\.parquet, line 2"):
        list(PromptSource(tmp_path / "c.parquet"))
    (tmp_path / "d.parquet").write_bytes(b"nothing")
    with pytest.raises(PromptSourceError, match=r"d\.parquet, line 1: not Parquet"):
        list(PromptSource(tmp_path / "d.parquet"))


def test_text_and_iterables(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b" one \r\n\ntwo")
    assert list(PromptSource(tmp_path / "a.txt")) == [Prompt(text=" one "), Prompt(text="two")]
    (tmp_path / "noname").write_bytes(b"one")
    assert list(PromptSource(tmp_path / "noname", "text")) == [Prompt(text="one")]
    items: list[Any] = ["b", [1, 2], np.array([1, 2]), {"text": "aé"}, PROMPTS[3]]
    expected = [PROMPTS[1], PROMPTS[2], PROMPTS[2], PROMPTS[0], PROMPTS[3]]
    assert list(PromptSource(iter(items))) == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b'{"text": 1}', "`text` has the wrong type"),
        (b'{"token_ids": [1, -1]}', "`token_ids` has the wrong type"),
        (b'{"token_ids": [true]}', "`token_ids` has the wrong type"),
        (b'{"token_ids": "x"}', "`token_ids` has the wrong type"),
        (b'{"messages": ["x"]}', "`messages` has the wrong type"),
        (b'{"text": "a", "prompt": "b"}', "needs one of"),
        (b"{}", "needs one of"),
        (b'{"text": "\xff"}', "not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n\n' + line)
    source = iter(PromptSource(tmp_path / "a.jsonl"))
    assert next(source) == Prompt(text="good")
    with pytest.raises(PromptSourceError, match=reason) as caught:
        next(source)
    assert (caught.value.file, caught.value.line) == ("a.jsonl", 3)


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x")
    for source, reason in (
        (tmp_path / "none.jsonl", "no file of prompts"),
        (f"{tmp_path}/*.jsonl", "no file of prompts matches"),
        (tmp_path / "a.bin", "says no format"),
        (3, "a path, a URL or an iterable"),
    ):
        with pytest.raises(SettingsError, match=reason):
            PromptSource(source)


def test_the_digest_is_of_content_and_order() -> None:
    def digest(*given: Prompt) -> str:
        found = PromptDigest()
        for one in given:
            found.add(one)
        return found.hexdigest()

    assert digest(*PROMPTS) == digest(*PROMPTS)
    assert (
        len({digest(*PROMPTS), digest(*PROMPTS[::-1]), digest(PROMPTS[0]), digest(Prompt(token_ids=[]))}) == 4
    )
