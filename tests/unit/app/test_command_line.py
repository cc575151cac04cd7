"""The command line up to the point where vLLM is imported, and the settings that it makes."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

import nnsight_engine
from api_schemas.administration import Key, NewKey
from api_schemas.interventions import parse_interventions
from api_schemas.operations import LogitLens, Steer
from app.auth.keys import Keys, Secret
from app.cli import main
from app.command_error import CommandError
from app.commands import serve, start_checks
from app.commands.serve import _announce, _check_sandbox
from app.commands.start_checks import Start, check_callers, split_model
from app.process_environment import environment_for_traces
from app.settings import Settings
from app.storage.database import Database
from app.storage.tables import AuditRow
from nnsight_engine.modeling.bundled import bundled_model_folder


def test_without_a_command_it_shows_its_usage_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "serve" in capsys.readouterr().out
    for arguments in (["serve", "--help"], ["serve", "model", "-h"]):
        assert main(arguments) == 0
        assert "nnsight-engine serve [MODEL]" in capsys.readouterr().out


COMMANDS = ("serve", "check", "chat", "lens", "steer", "run-batch", "keys create", "keys list", "keys rotate")


def test_help_names_values_by_words_and_says_where_vllms_options_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for command in COMMANDS:
        assert main([*command.split(), "--help"]) == 0
        shown = capsys.readouterr().out
        assert re.search(r"INTEGER|FLOAT|RANGE|BOOL", shown) is None, command
        assert ("--help=all" in shown) == (command in {"serve", "check"})


def test_a_shell_completes_commands_and_options() -> None:
    for words, found in (("nnsight-engine ser", "serve"), ("nnsight-engine serve --tap", "--taps")):
        variables = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        answer = subprocess.run(
            [sys.executable, "-m", "app"],
            env={**os.environ, "_NNSIGHT_ENGINE_COMPLETE": "complete_bash", **variables},
            capture_output=True, check=True, text=True,
        )  # fmt: skip
        assert answer.stdout.split() == [found]


def test_a_bad_setting_is_one_line_that_names_the_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNSIGHT_ENGINE_PORT", "many")
    assert main(["serve"]) == 1
    message = capsys.readouterr().err
    assert "NNSIGHT_ENGINE_PORT" in message
    assert "Traceback" not in message


def test_replicas_are_asked_for_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NNSIGHT_ENGINE_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(start_checks, "check_model", lambda *_: None)
    for arguments, status, expected in (
        (["--replicas", "two"], 2, "'--replicas'"),
        (["--replicas", "2", "--host", "0.0.0.0"], 1, "without keys"),
        (["--replicas", "0", "--port", "0"], 1, "replicas may be 0 only if max_replicas"),
    ):
        assert main(["serve", "model", *arguments]) == status
        message = capsys.readouterr().err
        assert expected in message
        assert "Traceback" not in message


OF_ONE_SERVER = (
    "--allowed-origins", "--middleware", "--disable-fastapi-docs", "--h11-max-header-count",
    "--enable-ssl-refresh", "--disable-uvicorn-access-log", "--uvicorn-log-level",
)  # fmt: skip


@pytest.mark.parametrize(
    ("option", "command"),
    [
        *itertools.product(["--grpc", "--tool-server"], [[], ["--replicas", "2"]]),
        *((option, ["--replicas", "2"]) for option in OF_ONE_SERVER),
        ("--ssl-certfile", ["--replicas", "2"]),
        ("--uds", ["--replicas", "2"]),
        ("--root-path", ["--replicas", "2"]),
        ("--api-key=secret", ["--replicas", "2"]),
        ("--api_key", ["--replicas", "2"]),
    ],
)
def test_an_option_without_effect_is_refused_before_anything_is_loaded(
    option: str, command: list[str], own_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "model", *command, option, "x"]) == 1
    message = capsys.readouterr().err
    assert f"{option.partition('=')[0].replace('_', '-')} is not supported: " in message.replace("\n", " ")
    assert "secret" not in message
    assert "Traceback" not in message


@pytest.fixture
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NNSIGHT_ENGINE_DATA_DIR", str(tmp_path))
    return tmp_path


def test_keys_are_made_replaced_and_ended(own_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def listed() -> list[dict[str, Any]]:
        assert main(["keys", "list", "--json"]) == 0
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return found

    assert (
        main(["keys", "create", "--tenant", "acme", "--scopes", "completions, code", "--tier", "trusted"])
        == 0
    )
    key = capsys.readouterr().out.strip()
    (made,) = listed()
    assert key.split("_")[:2] == ["nns", made["id"]]
    assert (made["tenant"], made["scopes"], made["tier"]) == ("acme", ["completions", "code"], "trusted")
    assert main(["keys", "rotate", made["id"], "--grace", "1"]) == 0
    assert capsys.readouterr().out.startswith("nns_")
    assert [one["replaces"] for one in listed()] == [made["id"], None]
    assert main(["keys", "revoke", made["id"]]) == 0
    assert [bool(one["revoked_at"]) for one in listed()] == [False, True]
    assert main(["keys", "limit", "acme", "requests_per_minute=60,concurrency=4"]) == 0
    assert "requests_per_minute=60, concurrency=4" in capsys.readouterr().err
    assert main(["keys", "list"]) == 0
    assert made["id"] in capsys.readouterr().out
    assert main(["keys", "list", "--tenant", "other"]) == 0
    assert "There are no keys of other; nnsight-engine keys create" in capsys.readouterr().err


def test_a_key_that_a_file_has_is_made_once_and_stays_ended(
    own_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key"
    key_id = "0123456789abcdef"
    adopt = ["keys", "adopt", str(file), "--tenant", "operators", "--scopes", "admin"]
    for text in ("", "nns_0123_short", "\x00"):
        file.write_text(text)
        assert main(adopt) == 2
        assert "must contain a key" in capsys.readouterr().err
    file.write_text(f"nns_{key_id}_{'a' * 43}\n")
    assert main(adopt) == 0
    assert main(["keys", "revoke", key_id]) == 0
    assert main(adopt) == 0
    capsys.readouterr()
    assert main(["keys", "list", "--json"]) == 0
    (made,) = json.loads(capsys.readouterr().out)
    assert (made["id"], made["tenant"], made["scopes"]) == (key_id, "operators", ["admin"])
    assert made["revoked_at"] is not None
    file.write_text(f"nns_{key_id}_{'b' * 43}")
    assert main(adopt) == 1
    assert "another secret" in capsys.readouterr().err


@pytest.mark.both_databases
def test_a_key_that_several_adopt_at_once_is_made_once(
    own_data: Path,
    database_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As replicas do that start together, each after it has found that the key is nobody's."""
    monkeypatch.setenv("NNSIGHT_ENGINE_DATABASE_URL", database_url)
    file, barrier, adopted = tmp_path / "key", threading.Barrier(3), Keys.adopt
    file.write_text(f"nns_0123456789abcdef_{'a' * 43}\n")

    async def together(keys: Keys, secret: Secret, new: NewKey) -> Key:
        barrier.wait(30)
        return await adopted(keys, secret, new)

    monkeypatch.setattr(Keys, "adopt", together)
    adopt = ["keys", "adopt", str(file), "--tenant", "operators", "--scopes", "admin"]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(main, [adopt] * 3)) == [0, 0, 0]
    assert capsys.readouterr().err.count("The key 0123456789abcdef of operators is registered.") == 3
    assert main(["keys", "list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1
    assert asyncio.run(_num_audited(Settings())) == 1


async def _num_audited(settings: Settings) -> int:
    database = Database(settings.data_dir, settings.database_url)
    await database.start()
    try:
        return await database.read(lambda session: session.query(AuditRow).count())
    finally:
        await database.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["adopt", "/nowhere/key", "--tenant", "a"], "/nowhere/key"),
        (["create"], "tenant"),
        (["create", "--tenant", "A b"], "tenant"),
        (["create", "--tenant", "a", "--scopes", "all"], "completions, interventions, code, metrics, admin"),
        (["create", "--tenant", "a", "--limits", "speed=3"], "speed"),
        (["create", "--tenant", "a", "--presets", "calm,Brief"], "presets.1"),
        (["create", "--tenant", "a", "--presets", "calm", "--scopes", "admin"], "presets"),
        (["limit", "a", "concurrency=0"], "concurrency"),
        (["limit", "a", "concurrency=many"], "concurrency"),
        (["limit", "a", "concurrency=0.5"], "concurrency"),
        (["rotate", "none", "--grace", "nan"], "grace_s"),
        (["revoke", "none"], "'none'"),
        (["drop"], "drop"),
    ],
)
def test_what_keys_does_not_understand_is_one_line(
    own_data: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["keys", *arguments]) in {1, 2}
    message = capsys.readouterr().err
    assert said in message
    assert "Traceback" not in message


def test_without_keys_it_does_not_listen_to_other_machines(own_data: Path) -> None:
    elsewhere = Settings(host="0.0.0.0")
    with pytest.raises(CommandError, match="keys create"):
        check_callers(elsewhere)
    assert not check_callers(Settings())
    assert main(["keys", "create", "--tenant", "acme"]) == 0
    assert check_callers(elsewhere)


@pytest.mark.parametrize(
    ("options", "missing", "refused"),
    [
        ({"sandbox_needs_namespaces": True}, ["user", "network"], True),
        ({"sandbox_needs_namespaces": True}, [], False),
        ({"sandbox_needs_namespaces": True, "sandbox": "off"}, ["user", "network"], False),
        ({}, ["user", "network"], False),
    ],
)
def test_it_does_not_start_where_sandboxes_lack_namespaces_that_they_are_to_have(
    options: dict[str, Any], missing: list[str], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.commands.serve.missing_namespaces", lambda: missing)
    if not refused:
        _check_sandbox(Settings(**options))
        return
    with pytest.raises(CommandError, match=r"user, network namespace.*sandbox_needs_namespaces"):
        _check_sandbox(Settings(**options))


@pytest.mark.parametrize(
    ("arguments", "variable", "said"),
    [
        (["--sandbox=thread", "--replicas", "2"], "process", "the sandbox is 'process' or 'off'"),
        ([], "thread", "NNSIGHT_ENGINE_SANDBOX is wrong"),
        # It would pass for neither, and code of strangers would run somewhere.
        (["--sandbox", "proces"], "process", "the sandbox is 'process' or 'off', got 'proces'"),
        (["gpt2", "--model", "gpt2"], "process", "MODEL is given twice"),
    ],
)
def test_a_value_that_means_nothing_is_refused(
    arguments: list[str],
    variable: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NNSIGHT_ENGINE_SANDBOX", variable)
    assert main(["serve", *arguments]) == 1
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_model_comes_first_or_as_an_option_or_not_at_all() -> None:
    assert split_model(["Qwen/Qwen3-0.6B", "--seed", "1"]) == ("Qwen/Qwen3-0.6B", ["--seed", "1"])
    assert split_model(["--seed", "1", "--model", "a/b", "-tp", "2"]) == ("a/b", ["--seed", "1", "-tp", "2"])
    assert split_model(["--model=a/b"]) == ("a/b", [])
    # The value of an option is no model.
    assert split_model(["--tensor-parallel-size", "2"]) == (None, ["--tensor-parallel-size", "2"])
    # A file of options comes first, so that the command line takes precedence.
    assert split_model(["a/b", "--seed", "1", "--config=f"]) == ("a/b", ["--config", "f", "--seed", "1"])


@pytest.mark.parametrize(("source", "op"), [(bundled_model_folder(), Steer), ("gpt2", LogitLens)])
def test_the_line_to_try_is_a_short_request_in_a_shell(source: object, op: type) -> None:
    spec, started, file = SimpleNamespace(name="m"), asyncio.Event(), io.StringIO()
    started.set()
    engine = SimpleNamespace(
        engine=SimpleNamespace(spec=spec), started=started, served=lambda: SimpleNamespace(source=source)
    )
    console = Console(file=file)
    asyncio.run(_announce(engine, "http://127.0.0.1:8000", Settings(), console, with_keys=True))
    ready, line = file.getvalue().splitlines()
    assert ready.startswith("Ready for holders of a key: m at http://127.0.0.1:8000,")
    line = line.partition(": ")[2]
    assert len(line) < 350
    assert '-H "Authorization: Bearer $NNSIGHT_ENGINE_KEY"' in line
    body = subprocess.run(
        ["bash", "-c", 'curl() { printf "%s" "${@: -1}"; }; ' + line],
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    (parsed,) = parse_interventions(json.loads(body)["interventions"])
    assert isinstance(parsed, op)


CONFIG = {"num_hidden_layers": 4, "max_position_embeddings": 2048, "num_attention_heads": 9}
MISTAKES: dict[str, tuple[list[str], str]] = {
    "a misspelt option": (["serve", "--prot", "8001"], "there is no option --prot; did you mean --port?"),
    "a misspelt option of vLLM": (["serve", "--max-modle-len=8"], "did you mean --max-model-len?"),
    "a misspelt command": (["sreve"], "sreve"),
    "a port in use": (["serve", "--port", "{port}"], "port {port}: Address already in use; choose"),
    "a port that is none": (
        ["serve", "--port", "99999"],
        "--port: Input should be less than or equal to 65535",
    ),
    "a host that is none": (["serve", "--host", "127.0.0.1x"], "cannot listen on 127.0.0.1x"),
    "a host for others without keys": (["serve", "--host", "0.0.0.0"], "keys create"),
    "a missing folder": (["serve", "./nowhere"], "there is no folder ./nowhere"),
    "a file": (["serve", "{folder}/config.json"], "config.json is a file"),
    "a folder without a model": (["serve", "{folder}/empty"], "empty has no config.json"),
    "a config that is no JSON": (["serve", "{folder}/broken"], "broken/config.json cannot be read"),
    "an address": (["serve", "https://huggingface.co/gpt2"], "not an address"),
    "an unknown name": (
        ["serve", "nobody/nothing"],
        "the cache of the Hugging Face Hub has no model nobody/nothing",
    ),
    "two models": (["serve", "{folder}", "gpt2"], "unexpected argument 'gpt2': MODEL, a single one"),
    "a model after the options": (["serve", "--seed", "1", "{folder}"], "comes before the options"),
    "a context that is too long": (["serve", "{folder}", "--max-model-len", "10M"], "at most 2048"),
    "no number": (["serve", "-tp", "two"], "it must be a whole number, got 'two'"),
    "ranks that do not divide": (
        ["serve", "{folder}", "-tp", "2"],
        "divide the model's 9 attention heads, got 2",
    ),
    "no choice": (["serve", "--dtype", "flaot16"], "got 'flaot16'; did you mean float16?"),
    "no value": (["serve", "--max-model-len"], "--max-model-len: expected one argument"),
    "no name": (["serve", "--served-model-name", ""], "--served-model-name must not be empty"),
    "a layer that is none": (["serve", "{folder}", "--taps", "layers.99.output"], "--taps layers.99.output"),
    "a point without taps": (["serve", "--taps", "layers.1.mlp.output"], "taps lie in the residual stream"),
    "a missing file of options": (["serve", "--config", "nowhere.yaml"], "there is no file nowhere.yaml"),
    "a misspelt setting": (["NNSIGHT_ENGINE_PROT=1", "serve"], "did you mean NNSIGHT_ENGINE_PORT?"),
    "a removed setting": (
        ["NNSIGHT_ENGINE_PRESET_STORE_BYTES=1", "serve"],
        "NNSIGHT_ENGINE_PRESET_STORE_BYTES is gone: it is a constant now (decision 64); remove the variable",
    ),
    "a wrong setting": (["NNSIGHT_ENGINE_PORT=many", "serve"], "the variable NNSIGHT_ENGINE_PORT is wrong"),
    "the older runner": (["VLLM_USE_V2_MODEL_RUNNER=0", "serve", "{folder}"], "need vLLM's model runner V2"),
    "no plugins": (
        ["VLLM_TARGET_DEVICE=cpu", "serve", "{folder}"],
        "VLLM_TARGET_DEVICE=cpu is not supported",
    ),
    "a folder for data that is none": (["NNSIGHT_ENGINE_DATA_DIR=/dev/null/a", "serve"], "/dev/null/a"),
    "a missing file of a key": (
        ["keys", "adopt", "/nowhere/key", "--tenant", "a"],
        "/nowhere/key cannot be read",
    ),
    "a missing model to check": (["check", "./nowhere"], "there is no folder ./nowhere"),
    "a misspelt option of check": (["check", "{folder}", "--promt", "a"], "did you mean --prompt?"),
}
"""Mistakes of users: variables and arguments, and a part of the one line that they get."""

# Each in turn, in one process: what was printed, and which slow packages are imported by then.
EACH = """
import contextlib, io, json, os, sys
from app.cli import main
for arguments in json.load(sys.stdin):
    variables = dict(one.split("=", 1) for one in arguments if one.startswith(("NNSIGHT_ENGINE_", "VLLM_")))
    before = dict(os.environ)
    os.environ.update(variables)
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        status = main(arguments[len(variables):])
    os.environ.clear()
    os.environ.update(before)
    slow = {"vllm", "torch", "transformers", "fastapi", "ray"} & set(sys.modules)
    print(json.dumps([status, errors.getvalue().splitlines(), sorted(slow)]))
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, list[Any]]]:
    """By mistake: the expected part of the message, and status, lines and slow packages."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "empty").mkdir()
    (folder / "broken").mkdir()
    (folder / "broken/config.json").write_text("{")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {"{port}": str(taken.getsockname()[1]), "{folder}": str(folder)}

        def filled(text: str) -> str:
            for place, value in places.items():
                text = text.replace(place, value)
            return text

        ran = subprocess.run(
            [sys.executable, "-c", EACH],
            input=json.dumps([[*map(filled, one)] for one, _ in MISTAKES.values()]),
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "HF_HUB_CACHE": str(folder / "empty"),
                "NNSIGHT_ENGINE_DATA_DIR": str(folder / "data"),
                "NNSIGHT_ENGINE_PORT": "0",
            },
            capture_output=True,
            check=True,
            text=True,
        )
    lines = map(json.loads, ran.stdout.splitlines())
    return {
        name: (filled(said), line) for (name, (_, said)), line in zip(MISTAKES.items(), lines, strict=True)
    }


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_before_anything_slow_is_imported(
    mistake: str, refused: dict[str, tuple[str, list[Any]]]
) -> None:
    said, (status, lines, slow) = refused[mistake]
    (line,) = lines
    assert line.startswith("nnsight-engine: ")
    assert said in line
    assert status in {1, 2}
    assert slow == []


def test_own_options_become_settings_and_others_reach_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Start] = []
    monkeypatch.setattr(serve, "run", runs.append)
    monkeypatch.setattr(start_checks, "check_model", lambda *_: None)
    vllm = [
        "--dtype",
        "float32",
        "-tp",
        "2",
        "-O3",
        "--max_model_len=1k",
        "--hf-overrides={'a': 1}",
        "--seed",
        "-1",
    ]
    vllm += [
        "--compilation-config.mode",
        "3",
        "-cc.mode=3",
        "--no-enable-lora",
        "--served-model-name",
        "a",
        "b",
    ]
    own = ["--local-engine", "--port=0", "--local-engine-device=cuda:1", "--taps", "off", "--compile"]
    assert main(["serve", "gpt2", *own[:2], *vllm[:5], *own[2:], *vllm[5:], "--replicas", "2"]) == 0
    (start,) = runs
    options = start.options
    assert (start.model, start.arguments) == ("gpt2", vllm)
    assert options.arguments == ["gpt2", *vllm]
    assert options.compiles
    assert options.settings == {
        "port": 0,
        "local_engine": True,
        "local_engine_device": "cuda:1",
        "taps": "off",
    }
    assert options.replicas == {"replicas": 2}


def test_a_replica_gets_the_options_of_its_command(monkeypatch: pytest.MonkeyPatch, own_data: Path) -> None:
    runs: list[Any] = []
    monkeypatch.setattr("app.replicas.command.run", lambda options, *_, **__: runs.append(options))
    monkeypatch.setattr(start_checks, "check_model", lambda *_: None)
    own = ["--local-engine", "--taps=off", "--compile", "--port", "0"]
    assert main(["serve", "gpt2", *own, "--dtype", "float32", "--replicas", "2", "--replica-cpus", "1"]) == 0
    arguments = ["--dtype", "float32", "--local-engine", "--taps=off", "--compile"]
    model = {"model": "gpt2", "arguments": arguments, "replicas": 2, "num_cpus": 1.0}
    assert runs == [{"models": [model]}]


@pytest.mark.parametrize("option", ["--local-engine-device", "--taps", "--host"])
@pytest.mark.parametrize("rest", [[], ["--port", "1"]])
def test_an_option_without_its_value_says_so(
    option: str, rest: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", option, *rest]) == 2
    assert option in capsys.readouterr().err


CYCLE = """
from nnsight_engine.core.process import uncollected

class Cycle:
    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        print("collected")

with uncollected():
    Cycle()
"""


def test_what_an_import_has_left_is_collected_at_the_end() -> None:
    # nanobind, of Triton, prints 27 lines of leaks otherwise, after the message that counts.
    answer = subprocess.run([sys.executable, "-c", CYCLE], capture_output=True, text=True, check=True)
    assert answer.stdout == "collected\n"


# What spawning does with the main module of a console script: it runs it again under another name.
SCRIPT_AGAIN = (
    "import runpy, sys\n"
    "runpy.run_module('app.command', run_name='__mp_main__')\n"
    "print({'app.cli', 'fastapi', 'torch', 'vllm'} & set(sys.modules))\n"
)


def test_an_engine_s_process_that_spawns_from_it_imports_nothing() -> None:
    answer = subprocess.run([sys.executable, "-c", SCRIPT_AGAIN], capture_output=True, text=True, check=True)
    assert answer.stdout == "set()\n"


@pytest.mark.parametrize("module", ["app", "app.cli"])
def test_both_modules_run_the_command_line(module: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == nnsight_engine.__version__
    refused = subprocess.run([sys.executable, "-m", module, "nothing"], capture_output=True, check=False)
    assert refused.returncode == 2


def test_the_environment_sets_and_arguments_win(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NNSIGHT_ENGINE_PORT", "9001")
    monkeypatch.setenv("NNSIGHT_ENGINE_RESULT_TTL_S", "5")
    assert (Settings().port, Settings().result_ttl_s) == (9001, 5.0)
    assert Settings(port=9002).port == 9002


@pytest.mark.parametrize("bad", [{"port": 70_000}, {"tenant_share": 2}, {"result_ttl_s": 0}])
def test_values_out_of_bounds_are_refused(bad: dict[str, float]):
    with pytest.raises(ValidationError):
        Settings.model_validate(bad)


def test_processes_that_run_clients_code_get_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NNSIGHT_ENGINE_HOST", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "VLLM_API_KEY", "DATABASE_URL"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    environment = environment_for_traces()
    assert "secret" not in environment.values()
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_jobs_lie_in_the_data_directory_and_a_password_is_not_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_DATA_HOME", "/somewhere")
    settings = Settings(database_url="postgresql://me:hunter2@there/jobs")
    assert settings.data_dir == Path("/somewhere/nnsight-engine/server")
    assert "hunter2" not in repr(settings)
