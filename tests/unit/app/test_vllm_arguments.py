"""Our defaults among vLLM's arguments."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from api_schemas.errors import ApiError
from app.commands.serve import _with_options_of_files
from app.engine.adapters import check_adapter_request
from app.engine.vllm_arguments import model_of_file, parse
from app.engine.vllm_options import (
    RECORD,
    REFUSED,
    refuse_ignored,
    refuse_with_replicas,
)
from app.settings import Settings
from nnsight_engine.core.errors import UnsupportedOptionError
from tests.unit.app.vllm_option_record import recorded
from tests.unit.app.vllm_option_tables import HANDLED_HERE, TO_ENGINE


@pytest.mark.parametrize(
    ("capability", "options", "dtype"),
    [
        ("AVX2", [], "float32"),
        ("AVX2", ["--dtype", "bfloat16"], "bfloat16"),
        ("AVX512", [], "auto"),
        ("DEFAULT", [], "auto"),
    ],
)
def test_models_run_in_float32_where_bfloat16_is_slow(
    capability: str, options: list[str], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert parse(["some/model", *options]).dtype == dtype


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    """Return vLLM's own parser."""
    found: FlexibleArgumentParser = make_arg_parser(FlexibleArgumentParser())
    return found


def test_every_option_of_vllm_is_passed_on_done_or_refused(parser: FlexibleArgumentParser) -> None:
    # A new version's new option is in none of the tables: decide what becomes of it, and put it into one.
    named = {action.dest for action in parser._actions}
    tables = (TO_ENGINE, HANDLED_HERE, frozenset(REFUSED))
    assert named == frozenset.union(*tables)
    assert sum(map(len, tables)) == len(named)
    assert {field.name for field in dataclasses.fields(AsyncEngineArgs)} >= TO_ENGINE


def test_the_record_of_vllms_options_is_that_of_the_installed_version() -> None:
    # Otherwise write it anew: python -m tests.unit.app.vllm_option_record
    assert json.loads(RECORD.read_text(encoding="utf-8")) == recorded()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_option_without_effect_is_refused_by_name_with_what_to_do(
    name: str, parser: FlexibleArgumentParser
) -> None:
    args = parser.parse_args(["some/model"])
    setattr(args, name, "anything else")
    with pytest.raises(UnsupportedOptionError) as caught:
        refuse_ignored(args, parser)
    assert str(caught.value) == f"--{name.replace('_', '-')} is not supported: {REFUSED[name]}"


def test_the_variable_of_vllms_key_is_refused_with_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert parse(["some/model"]).api_key is None
    with pytest.raises(UnsupportedOptionError, match=r"VLLM_API_KEY.*keys create") as caught:
        refuse_with_replicas([])
    assert "secret" not in str(caught.value)


def test_an_option_of_a_file_is_refused_too(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("tool-server: demo\n")
    with pytest.raises(UnsupportedOptionError, match="--tool-server"):
        parse(["some/model", "--config", str(file)])


def test_a_file_of_options_may_name_the_model(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model: a/b\nseed: 3\n")
    assert model_of_file(str(file)) == "a/b"
    file.write_text("enforce-eager: true\nseed: 3\n")
    assert model_of_file(str(file)) is None
    file.write_text("- a\n")
    for path in (str(file), str(tmp_path / "absent.yaml"), str(tmp_path / "options.json")):
        with pytest.raises(UnsupportedOptionError, match="cannot be read"):
            model_of_file(path)


def test_a_file_of_options_says_where_to_listen(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("host: 127.0.0.2\nport: 9001\nsse-keep-alive-interval: 5\n")
    args = parse(["some/model", "--config", str(file)])
    found = _with_options_of_files(Settings(), args)
    assert (found.host, found.port, found.sse_keep_alive_s) == ("127.0.0.2", 9001, 5)
    found = _with_options_of_files(Settings(host="127.0.0.3", port=9002), args)
    assert (found.host, found.port) == ("127.0.0.3", 9002)
    found = _with_options_of_files(Settings(), parse(["some/model"]))
    assert found == Settings()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--enable-auto-tool-choice"], "requires --tool-call-parser"),
        (["--enable-auto-tool-choice", "--tool-call-parser", "none"], "invalid tool call parser: none"),
        (["--chat-template", "absent.jinja"], "absent.jinja"),
        (["--enable-log-outputs"], "requires --enable-log-requests"),
        (["--sse-keep-alive-interval", "-1"], "--sse-keep-alive-interval must be"),
    ],
)
def test_what_vllm_refuses_is_refused_before_the_model_is_loaded(options: list[str], message: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=message):
        parse(["some/model", *options])


def test_what_says_what_is_done_anyway_is_let_through() -> None:
    args = parse(["some/model", "--data-parallel-size", "1", "--no-enable-lora", "--no-allow-credentials"])
    assert (args.data_parallel_size, args.enable_lora, args.allow_credentials) == (1, False, False)


def test_adapters_are_passed_on() -> None:
    args = parse(["some/model", "--enable-lora", "--max-loras", "2", "--lora-modules", "one=/srv/one"])
    assert (args.enable_lora, args.max_loras) == (True, 2)
    assert [(one.name, one.path) for one in args.lora_modules] == [("one", "/srv/one")]
    given = '{"name": "two", "path": "/srv/two"}'
    assert parse(["some/model", "--enable-lora", "--lora-modules", given]).lora_modules[0].name == "two"


@pytest.mark.parametrize(
    "name", [" ", "..", "a:b", "Pirate", "a\nb", "a" * 65, "<img src=x onerror=alert(1)>"]
)
def test_an_adapters_name_is_as_other_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedOptionError, match="lower-case letters"):
        parse(
            ["some/model", "--enable-lora", "--lora-modules", json.dumps({"name": name, "path": "/srv/one"})]
        )
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    fields = {"lora_name": name, "lora_path": "/srv/one"}
    with pytest.raises(ApiError, match="lower-case letters") as caught:
        check_adapter_request(fields, takes_adapters=True)
    assert (caught.value.status, caught.value.param) == (400, "lora_name")
    with pytest.raises(ApiError, match="--enable-lora") as caught:
        check_adapter_request(fields, takes_adapters=False)
    assert caught.value.status == 400


def test_adapters_need_an_engine_that_takes_them() -> None:
    with pytest.raises(UnsupportedOptionError, match="--enable-lora"):
        parse(["some/model", "--lora-modules", "one=/srv/one"])


def test_replicas_load_no_adapters_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "true")
    with pytest.raises(UnsupportedOptionError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        refuse_with_replicas([])
