"""The restricted compile by itself: nothing gets out of it, and ordinary blocks do not notice it."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine import NNsight
from nnsight_engine.core.trees import map_tensors
from nnsight_engine.sandbox.restricted import Budget, restricted_policy
from nnsight_engine.sandbox.restricted.policy import RestrictedRules
from nnsight_engine.serialization import TRUSTED, SandboxError, decode, encode
from tests.security.attempts import Attempt, every_attempt
from tests.security.host import Small, message_of, run
from tests.security.ordinary import BLOCKS

HELD_OFF = [attempt for attempt in every_attempt() if attempt.ground == "restricted"]
_SANDBOXED = "SandboxError"
_ENDED = {
    "AttributeError",
    "KeyError",
    "NameError",
    "RecursionError",
    "RuntimeError",
    "SyntaxError",
    "TypeError",
}
"""Errors of Python's own that say that something is not there, or not so deep."""


class Surroundings:
    """What attempts must not get at."""

    def __init__(self, folder: Path) -> None:
        self.canary = folder / "canary"
        self.text = secrets.token_hex()
        self.canary.write_text(self.text)
        self.secret = secrets.token_hex()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.answers = ""
        self.outcomes: dict[str, dict[str, Any]] = {}

    def try_all(self, ways: str, *names: str) -> subprocess.CompletedProcess[str]:
        """Run attempts in a process of their own."""
        port = str(self.socket.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "tests.security.host", str(self.canary), port, ways, *names],
            env={**os.environ, "NNSIGHT_ENGINE_TEST_SECRET": self.secret},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        self.answers = done.stdout
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
        self.outcomes = {line["name"]: line for line in lines}
        return done

    def was_called(self) -> bool:
        """Tell whether somebody connected to the socket."""
        try:
            self.socket.accept()
        except BlockingIOError:
            return False
        return True


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surroundings]:
    """The attempts' outcomes."""
    surroundings = Surroundings(tmp_path_factory.mktemp("canary"))
    done = surroundings.try_all("restricted")
    assert done.returncode == 0, done.stderr[-2000:]
    yield surroundings
    surroundings.socket.close()


@pytest.mark.parametrize("attempt", HELD_OFF, ids=lambda attempt: attempt.name)
def test_an_attempt_gets_nothing(tried: Surroundings, attempt: Attempt) -> None:
    outcome = tried.outcomes[attempt.name]
    if "error" in outcome:
        assert _SANDBOXED in outcome["error"] or outcome["error"][0] in _ENDED, outcome
    else:
        assert not outcome["got"], outcome


def test_most_are_refused_in_words_of_the_sandbox(tried: Surroundings) -> None:
    said = [one for one in tried.outcomes.values() if _SANDBOXED in one.get("error", ())]
    assert len(said) > 0.95 * len(HELD_OFF)
    assert len(HELD_OFF) >= 400
    assert all("docs/sandbox-language.md" in one["text"] or "and may" in one["text"] for one in said)


def test_nothing_around_was_touched(tried: Surroundings) -> None:
    assert tried.canary.read_text() == tried.text
    assert sorted(path.name for path in tried.canary.parent.iterdir()) == ["canary"]
    assert not tried.was_called()
    assert tried.secret not in tried.answers
    assert tried.text not in tried.answers


def test_the_attempts_are_real(tmp_path: Path) -> None:
    surroundings = Surroundings(tmp_path)
    names = [
        "escapes-open", "escapes-open-write", "escapes-import-socket", "walks-class", "engine-weight",
        "libraries-tensor-data-ptr", "walks-generator-frame",
    ]  # fmt: skip
    surroundings.try_all("trusted", *names)
    got = {name for name, one in surroundings.outcomes.items() if one.get("got")}
    assert got == {*names} - {"escapes-open-write", "escapes-import-socket"}
    assert surroundings.canary.read_text() == "touched"
    assert surroundings.was_called()
    surroundings.socket.close()


def _plain(value: Any) -> Any:
    """Return a value as what a client would get of it, to be compared."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, value.shape, value.detach().tolist())
    if isinstance(value, list | tuple):
        return (type(value), [_plain(one) for one in value])
    if isinstance(value, dict):
        return (type(value), {key: _plain(one) for key, one in value.items()})
    return value if isinstance(value, int | float | str | None) else repr(value)


@pytest.mark.parametrize("name", BLOCKS)
def test_an_ordinary_block_does_the_same(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = []
    for policy in (TRUSTED, restricted_policy(Budget())):
        given = torch.arange(12.0).reshape(3, 4)
        message = message_of(BLOCKS[name].strip("\n"), x=given)
        with torch.random.fork_rng():
            saved = run(message, NNsight(Small()), policy, torch.ones(1, 5))["saved"]
        assert saved
        outcomes.append((_plain(map_tensors(saved, torch.clone)), capsys.readouterr().out))
        decode(encode({key: one for key, one in saved.items() if key != "cache"}), policy=TRUSTED)
    assert outcomes[0] == outcomes[1]


def test_the_page_names_every_module() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sandbox-language.md").read_text()
    rules = restricted_policy(Budget()).rules
    assert isinstance(rules, RestrictedRules)
    with pytest.raises(SandboxError, match="the module `os`") as caught:
        rules.find("os", "")
    offered = str(caught.value).partition("there are ")[2].partition(" (see")[0].split(", ")
    assert len(offered) > 20
    assert [module for module in offered if f"`{module}`" not in page] == []
