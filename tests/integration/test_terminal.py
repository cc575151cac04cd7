"""``nnsight-engine chat | lens | steer`` as processes, against a server over the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from rich.console import Console

from app.cli import main
from app.terminal.batch import Batch
from tests.fakes.engine import FakeEngineClient
from tests.integration import dictionary_files
from tests.integration.live import listening
from tests.integration.serving import Application
from tests.waiting import wait_for


class SteerableEngine(FakeEngineClient):
    """Says another word where it is steered, and remembers what it was asked."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.heard: list[list[str]] = []

    async def completions(self, body: Any, interventions: Any, *rest: Any, **options: Any) -> Any:
        if any(one.op == "steer" for one in interventions):
            body = {**body, "prompt": f"{body['prompt']} joyful"}
        return await super().completions(body, interventions, *rest, **options)

    async def chat(self, body: Any, interventions: Any, *rest: Any, **options: Any) -> Any:
        self.heard.append([str(message["content"]).strip() for message in body["messages"]])
        if any(one.op == "steer" for one in interventions):
            last = body["messages"][-1]
            body = {**body, "messages": [{**last, "content": f"{last['content']} joyful"}]}
        return await super().chat(body, interventions, *rest, **options)


class Typist:
    """Sits before a terminal in which a command runs."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.status: int | None = None
        self._pid = pid
        self._descriptor = descriptor
        self._seen = ""

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def sees(self, text: str) -> None:
        """Wait for a text beyond those that were seen."""
        while text not in self._seen:
            assert self._reads(30), f"{text!r} does not come, after {self._seen!r}"
        self._seen = self._seen.partition(text)[2]

    def presses(self, key: str, until: str) -> None:
        """Press a key, again where it was not noticed, and wait for a text.

        CPython sees a Ctrl-C only where it interrupts readline's wait for keys, not just before it.
        """
        for _ in range(30):
            self.type(key)
            while until not in self._seen and self._reads(1):
                pass
            if until in self._seen:
                break
        self.sees(until)

    def _reads(self, patience_s: float) -> bool:
        """Wait for more, and take it; tells whether it came."""
        ready, _, _ = select.select([self._descriptor], [], [], patience_s)
        if ready:
            self._seen += os.read(self._descriptor, 4096).decode(errors="replace")
        return bool(ready)

    def ends(self) -> int:
        self.status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self.status


class Terminal:
    """A server, and commands that talk to it."""

    def __init__(self, url: str, engine: SteerableEngine) -> None:
        self.url = url
        self.engine = engine

    def start(self, *arguments: str, url: str | None = None, **variables: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "NNSIGHT_ENGINE_URL": url or self.url,
            "COLUMNS": "100",
            "PYTHONUNBUFFERED": "1",
            **variables,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "app", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    @contextlib.contextmanager
    def typing(self, *arguments: str) -> Iterator[Typist]:
        """Run a command in a terminal of its own."""
        variables = {"NNSIGHT_ENGINE_URL": self.url, "TERM": "xterm-256color"}
        pid, descriptor = pty.fork()
        if not pid:
            program = [sys.executable, "-m", "app", *arguments]
            os.execve(sys.executable, program, {**os.environ, **variables})
        typist = Typist(pid, descriptor)
        try:
            yield typist
        finally:
            if typist.status is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            os.close(descriptor)

    def run(self, *arguments: str, said: str = "", **variables: Any) -> tuple[int, str, str]:
        with self.start(*arguments, **variables) as process:
            out, err = process.communicate(said, timeout=60)
        return process.returncode, out, err


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    folder: Path = tmp_path_factory.mktemp("server")
    served = Application(folder, engine=SteerableEngine)
    with listening(served.app) as url:
        vector = {"name": "joy", "vectors": {"2": [1.0] * 8}}
        httpx.post(f"{url}/v1/vectors", json=vector).raise_for_status()
        assert isinstance(served.engine, SteerableEngine)
        yield Terminal(url, served.engine)


def test_lens_prints_layers_down_and_tokens_across_with_colours(terminal: Terminal) -> None:
    status, out, _ = terminal.run("lens", "one two three", FORCE_COLOR="1", COLORTERM="truecolor")
    assert status == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", out)
    lines = text.splitlines()
    assert lines[0].split() == ["layer", "·one", "·two", "·three"]
    assert [line.split()[0] for line in lines[1:5]] == ["3", "2", "1", "0"]
    assert lines[1].split()[1:] == ["·one", "61%", "·two", "61%", "·three", "61%"]
    assert "\x1b[" in out
    assert "48;2;" in out, "cells have a ground"


def test_more_tokens_fit_where_colours_alone_show_the_probabilities(terminal: Terminal) -> None:
    prompt = " ".join(f"w{index}" for index in range(30))
    shown = {}
    for colours in ({"FORCE_COLOR": "1", "COLORTERM": "truecolor"}, {"NO_COLOR": "1"}):
        status, out, _ = terminal.run("lens", prompt, COLUMNS="80", **colours)
        assert status == 0
        lines = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
        assert max(map(len, lines)) <= 80
        tokens = lines[0].split()[1:]
        assert tokens == [f"·w{index}" for index in range(30)][-len(tokens) :]
        assert lines[1].split()[1:] == [
            part for one in tokens for part in ([one, "61%"] if "NO_COLOR" in colours else [one])
        ]
        shown[next(iter(colours))] = len(tokens)
        _, out, _ = terminal.run("lens", prompt, "--all", COLUMNS="80", **colours)
        text = re.sub(r"\x1b\[[0-9;]*m", "", out)
        assert sum(line.count("·w") for line in text.splitlines() if line.startswith("layer")) == 30
    assert shown["FORCE_COLOR"] == 14 > shown["NO_COLOR"]


def test_steer_shows_both_texts_and_marks_the_difference(terminal: Terminal) -> None:
    arguments = ("dogs are", "--vector", "joy", "--scale", "4", "--max-tokens", "6")
    status, out, err = terminal.run("steer", *arguments)
    assert (status, err) == (0, "")
    assert "baseline" in out
    assert "joy × 4 at 2" in out
    baseline, steered = re.search(r"│ (.+?)\s*│+ *│ (.+?)\s*│", out).groups()  # type: ignore[union-attr]
    assert baseline == "dogs are dogs are dogs are dogs are"
    assert steered == "dogs are dogs are joyful dogs are joyful"
    assert "What differs is marked." in out
    status, narrow, _ = terminal.run("steer", *arguments, COLUMNS="50")
    assert status == 0
    assert max(map(len, narrow.splitlines())) <= 50


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["steer", "dogs", "--vector", "sorrow", "--layer", "2"], ["sorrow"]),
        (["chat", "--url", "ftp://nowhere"], ["a server's address is like http://127.0.0.1:8000"]),
        (
            ["lens", "one", "--url", "NOBODY"],
            ["no server answers at NOBODY", "nnsight-engine serve", "make serve"],
        ),
    ],
    ids=["refused", "no address", "no server"],
)
def test_what_goes_wrong_is_one_sentence(terminal: Terminal, arguments: list[str], said: list[str]) -> None:
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
        status, out, err = terminal.run(*(one.replace("NOBODY", nobody) for one in arguments))
    assert (status, out) == (1, "")
    assert all(one.replace("NOBODY", nobody) in err for one in said), err
    assert "Traceback" not in err


def test_chat_keeps_the_conversation_and_clears_it_on_command(terminal: Terminal) -> None:
    terminal.engine.heard.clear()
    said = "one two\n/help\nthree\n/reset\nfour\n/nothing\n"
    status, out, err = terminal.run("chat", "--max-tokens", "2", said=said)
    assert status == 0
    assert [line.strip() for line in out.splitlines()] == ["one two", "three three", "four four"]
    assert terminal.engine.heard == [["one two"], ["one two", "one two", "three"], ["four"]]
    assert re.search(r"Ctrl-D +end the conversation", err)
    assert "A new conversation begins." in err
    assert "There is no command /nothing" in err


def test_chat_is_steered_and_compared_by_commands(terminal: Terminal) -> None:
    said = (
        "/vector joy\n/scale 2\none\n/compare\ntwo\n/compare\n/vector\nthree\n/vector sorrow\n/scale much\n"
        "/preset calm\nfour\n"
    )
    status, out, err = terminal.run("chat", "--max-tokens", "3", said=said)
    assert status == 0
    lines = [line.strip() for line in out.splitlines()]
    assert lines[0] == "one joyful one"
    assert re.search(r"│ +two two two +│ +│ +two joyful two +│", out), "the baseline stands beside it"
    assert lines[-1] == "three three three"
    assert terminal.engine.heard[-1] == ["one", "one joyful one", "two", "two joyful two", "three"]
    for one in (
        "Answers are steered by joy × 1 at 2.",
        "Answers are steered by joy × 2 at 2.",
        "Answers are shown beside the baseline.",
        "Nothing steers.",
        "has no vector sorrow",
        "/scale needs a number, got 'much'",
        "Answers are steered by the preset calm.",
        "preset 'calm'",  # the server has none
    ):
        assert one in err, one
        err = err.partition(one)[2]


def test_ctrl_c_ends_an_answer_in_the_engine_too_and_the_chat_goes_on(terminal: Terminal) -> None:
    behaviour = terminal.engine.behaviour
    behaviour.delay_s = 0.2
    try:
        with terminal.start("chat", "--max-tokens", "200") as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("one two\n")
            process.stdin.flush()
            assert process.stdout.read(4).strip() == "one"
            process.send_signal(signal.SIGINT)
            wait_for(lambda: terminal.engine.num_running == 0)
            behaviour.delay_s = 0.0
            terminal.engine.heard.clear()
            out, err = process.communicate("go on\n", timeout=60)
            assert process.returncode == 0
    finally:
        behaviour.delay_s = 0.0
    assert "The answer was cancelled." in err
    assert out.count("go on") == 100
    (messages,) = terminal.engine.heard
    assert messages[0] == "one two"
    assert messages[1].startswith("one"), "what there was of the answer is kept"
    assert messages[2] == "go on"


def test_at_a_terminal_ctrl_c_clears_the_line_and_ctrl_d_ends(terminal: Terminal) -> None:
    with terminal.typing("chat", "--max-tokens", "3") as typist:
        typist.sees("/help lists")
        typist.sees("you: ")
        typist.type("one two\r")
        typist.sees("one two one")
        typist.sees("you: ")
        typist.type("what I do not say")
        typist.sees("what I do not say")
        typist.presses("\x03", until="Ctrl-D ends the conversation.")
        typist.sees("you: ")
        typist.type("\x04")
        assert typist.ends() == 0


def test_at_a_terminal_a_steered_text_comes_token_by_token(terminal: Terminal) -> None:
    behaviour = terminal.engine.behaviour
    behaviour.delay_s = 0.3
    try:
        with terminal.typing(
            "steer", "dogs", "--vector", "joy", "--layer", "2", "--max-tokens", "8"
        ) as typist:
            typist.sees("joyful")
            assert terminal.engine.num_running == 1, "it is shown while more is to come"
            typist.sees("What differs is marked.")
            assert typist.ends() == 0
    finally:
        behaviour.delay_s = 0.0


PRESET: Final = {
    "description": "joyful",
    "interventions": [
        {"op": "steer", "at": "layers.2.output", "vector": {"name": "joy"}},
        {"op": "feature", "dictionary": "sae", "changes": [{"feature": 3, "value": 1.0}]},
        {"op": "detect", "detector": "calm", "name": "calm"},
    ],
}


def test_all_kinds_are_added_listed_exported_and_added_again(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments: str) -> str:
        assert main(arguments) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    monkeypatch.setenv("NNSIGHT_ENGINE_URL", terminal.url)
    monkeypatch.chdir(tmp_path)
    prompts = {
        "positive": ["one up", "two up", "three up"],
        "negative": ["one", "two", "three"],
        "position": -1,
    }
    Path("prompts.json").write_text(json.dumps(prompts))
    (tmp_path / "folder").mkdir()
    Path("folder/cfg.json").write_bytes(dictionary_files.cfg())
    Path("folder/sae_weights.safetensors").write_bytes(dictionary_files.weights())
    Path("folder/labels.json").write_text(json.dumps({str(feature): f"f{feature}" for feature in range(16)}))
    Path("preset.json").write_text(json.dumps(PRESET))
    terminal.engine.behaviour.pulls = {"up": (1.0, 2.0, 3.0, 4.0)}
    assert command("vectors", "train", "up", "prompts.json") == "The vector up@1 is stored.\n"
    assert command("detectors", "train", "calm", "prompts.json") == "The detector calm@1 is stored.\n"
    assert command("dictionaries", "add", "sae", "folder") == "The dictionary sae@1 is stored.\n"
    assert command("presets", "add", "glad", "preset.json") == "The preset glad@1 is stored.\n"
    for kind, name, file in (
        ("vectors", "up", "up.safetensors"),
        ("detectors", "calm", "calm.safetensors"),
        ("dictionaries", "sae", "sae"),
        ("presets", "glad", "glad.json"),
    ):
        assert f"{name}@1" in command(kind, "list")
        assert command(kind, "export", name) == f"{file}\n"
        assert main((kind, "export", name)) == 1
        assert "exists; choose another path with -o" in capsys.readouterr().err
        assert main((kind, "export", f"{name}@9", "-o", "none")) == 1
        assert f"{name}" in capsys.readouterr().err
        assert not Path("none").exists()
        command(kind, "add", "again", file)
        command(kind, "export", "again", "-o", f"again-{file}")
    found = {
        kind: {one["name"]: one for one in httpx.get(f"{terminal.url}/v1/{kind}").json()["data"]}
        for kind in ("vectors", "detectors", "dictionaries", "presets")
    }
    for kind, name in (
        ("vectors", "up"),
        ("detectors", "calm"),
        ("dictionaries", "sae"),
        ("presets", "glad"),
    ):
        first, again = found[kind][name], found[kind]["again"]
        told = ("sha256", "description", "num_labels", "operations")
        assert [again.get(key) for key in told] == [first.get(key) for key in told], kind
    assert found["vectors"]["again"]["training"] == found["vectors"]["up"]["training"]
    best = str(found["vectors"]["up"]["training"]["best_layer"])
    assert f"up × 1 at {best}" in command("steer", "dogs", "--vector", "up", "--max-tokens", "2")

    # The file of a preset has what its operations name, but for dictionaries.
    httpx.delete(f"{terminal.url}/v1/vectors/{found['vectors']['again']['id']}")
    preset = httpx.get(f"{terminal.url}/v1/presets/again").json()
    joy = preset["interventions"][0]["vector"]
    httpx.delete(f"{terminal.url}/v1/vectors/{joy['id']}").raise_for_status()
    command("presets", "add", "third", "glad.json")
    third = httpx.get(f"{terminal.url}/v1/presets/third").json()["interventions"]
    assert (third[0]["vector"]["name"], third[1:]) == ("joy@2", preset["interventions"][1:])
    for name in ("sae", "again"):
        httpx.delete(f"{terminal.url}/v1/dictionaries/{found['dictionaries'][name]['id']}").raise_for_status()
    assert main(("presets", "add", "fourth", "glad.json")) == 1
    assert "needs the dictionary sae@1" in capsys.readouterr().err


def test_ctrl_c_ends_a_command_as_shells_have_it(terminal: Terminal) -> None:
    behaviour = terminal.engine.behaviour
    behaviour.delay_s = 30.0
    try:
        arguments = ("dogs", "--vector", "joy", "--layer", "2")
        with terminal.start("steer", *arguments) as process:
            wait_for(lambda: terminal.engine.num_running == 1)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        wait_for(lambda: terminal.engine.num_running == 0)
    finally:
        behaviour.delay_s = 0.0
    assert process.returncode == 130
    assert "Traceback" not in err


def test_a_server_that_starts_is_waited_for(terminal: Terminal) -> None:
    terminal.engine.behaviour.is_starting = True
    timer = threading.Timer(3.0, setattr, (terminal.engine.behaviour, "is_starting", False))
    timer.start()
    try:
        status, out, _ = terminal.run("lens", "one two", "--layers", "3")
    finally:
        timer.cancel()
        terminal.engine.behaviour.is_starting = False
    assert status == 0
    assert "·two" in out


def test_a_server_that_breaks_off_is_not_said_to_be_missing(terminal: Terminal) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def hang_up() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)

        thread = threading.Thread(target=hang_up)
        thread.start()
        status, _, err = terminal.run("lens", "one", url=url)
        thread.join()
    assert status == 1
    assert f"{url} closed the connection" in err
    assert "nnsight-engine serve" not in err
    assert "Traceback" not in err


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def test_a_batch_is_answered_in_order_and_tells_what_failed(terminal: Terminal, tmp_path: Path) -> None:
    steer = {"op": "steer", "at": "layers.2.output", "vector": {"name": "joy"}}
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(str(index), prompt=f"word{index}", max_tokens=2) for index in range(20)]
    lines += ["", line("steered", prompt="word", max_tokens=2, interventions=[steer])]
    lines += [line("wrong", prompt="word", interventions=[{"op": "nothing"}]), line("lost", "/v1/nowhere")]
    source.write_text("\n".join(lines))
    status, _, err = terminal.run("run-batch", "-i", str(source), "-o", str(target), "--concurrency", "4",
                                  "--url", terminal.url)  # fmt: skip
    assert (status, "2 of 23 requests failed" in err) == (1, True), err
    answers = [json.loads(one) for one in target.read_text().splitlines()]
    assert [one["custom_id"] for one in answers] == [*map(str, range(20)), "steered", "wrong", "lost"]
    texts = [one["response"]["body"]["choices"][0]["text"] for one in answers[:21]]
    assert texts[19].split() == ["word19", "word19"]
    assert texts[20].split() == ["word", "joyful"]
    assert [one["response"]["status_code"] for one in answers[20:]] == [200, 400, 404]
    assert answers[21]["error"]["code"] == "unknown_operation"
    assert all(one["response"]["request_id"] for one in answers)


def test_the_answers_of_a_batch_never_replace_its_requests(terminal: Terminal, tmp_path: Path) -> None:
    source, link = tmp_path / "in.jsonl", tmp_path / "link"
    content = "\ufeff" + line("a", prompt="word", max_tokens=2)
    source.write_text(content)
    link.symlink_to(source)
    (tmp_path / "x.part").symlink_to(source)
    asked = ["run-batch", "-i", str(source), "--url", terminal.url, "-o"]
    for target in (source, tmp_path / ".." / tmp_path.name / source.name, link, tmp_path / "x"):
        status, _, err = terminal.run(*asked, str(target))
        assert (status, "over the requests" in err, source.read_text()) == (1, True, content), err
    target = tmp_path / "out.jsonl"
    assert terminal.run(*asked, str(target))[0] == 0
    assert [json.loads(one)["custom_id"] for one in target.read_text().splitlines()] == ["a"]
    assert not (tmp_path / "out.jsonl.part").exists()
    status, _, err = terminal.run(*asked, str(tmp_path / "none" / "out"))
    assert (status, "make its folder" in err) == (1, True), err


def test_a_batch_file_that_changes_meanwhile_is_no_success(tmp_path: Path) -> None:
    class Answering:
        async def response(self, *_: Any) -> httpx.Response:
            return httpx.Response(200, json={})

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(line, "abc")))
    target.write_text("before")
    batch = Batch(source, target)
    source.write_text(line("a"))
    with pytest.raises(ValueError, match="3 requests at first, and 1 were answered"):
        asyncio.run(batch.run(Answering(), Console(quiet=True)))  # type: ignore[arg-type] # all that is used of it
    assert target.read_text() == "before"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"custom_id": "a", "url": "/v1/completions", "body": {}}\n{"url": 3}', "line 2: custom_id"),
        ("nonsense", "line 1: the line"),
        (line("a", stream=True), "are not streamed"),
        (line("a", url="completions"), "a path such as"),
    ],
)
def test_a_batch_that_is_none_is_refused_before_anything_is_sent(
    terminal: Terminal, tmp_path: Path, content: str, said: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(content)
    status, _, err = terminal.run(
        "run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--url", terminal.url
    )
    assert (status, said in err) == (1, True), err
    assert not (tmp_path / "out").exists()
