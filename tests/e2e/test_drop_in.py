"""Command lines as vLLM's documentation writes them, with ``nnsight-engine serve`` for ``vllm serve``.

All of them are read by the whole command, and give vLLM's configuration of an engine.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped] # it has no types
from vllm.config import VllmConfig
from vllm.usage.usage_lib import UsageContext

from app.cli import main
from app.commands import serve
from app.engine.vllm_arguments import engine_arguments
from app.server.http_options import HttpOptions, listening_options, log_options
from app.settings import Settings
from nnsight_engine.vllm_backend.unsupported_options import check_supported
from tests.families.checkpoints import write_checkpoint

pytestmark = pytest.mark.e2e

Config = VllmConfig
Shows = Callable[[Any, argparse.Namespace, Settings], bool]

LINES: dict[str, Shows] = {
    "vllm serve MODEL": lambda config, args, _: config.model_config.model == args.model,
    "vllm serve --model MODEL --dtype bfloat16 --max-model-len 128": lambda config, *_: (
        str(config.model_config.dtype) == "torch.bfloat16" and config.model_config.max_model_len == 128
    ),
    "vllm serve MODEL --dtype auto --max-model-len 0.1k --port 8765": lambda config, _, settings: (
        config.model_config.max_model_len == 100 and settings.port == 8765
    ),
    "vllm serve MODEL --served-model-name tiny tiny-alias": lambda _, args, __: (
        args.served_model_name == ["tiny", "tiny-alias"]
    ),
    "vllm serve MODEL --enable-auto-tool-choice --tool-call-parser hermes": lambda _, args, __: (
        args.tool_call_parser == "hermes"
    ),
    "vllm serve MODEL --enable-auto-tool-choice --tool-call-parser llama3_json --chat-template TEMPLATE": (
        lambda _, args, __: args.chat_template.endswith("template.jinja")
    ),
    "vllm serve MODEL --reasoning-parser granite": lambda config, *_: (
        config.structured_outputs_config.reasoning_parser == "granite"
    ),
    "vllm serve MODEL --host 0.0.0.0 --api-key token-abc123": lambda _, args, settings: (
        (args.api_key, settings.host) == (["token-abc123"], "0.0.0.0")
    ),
    "vllm serve --config CONFIG": lambda config, args, settings: (
        (config.scheduler_config.max_num_seqs, args.served_model_name, settings.port) == (7, ["tiny"], 8123)
    ),
    "vllm serve MODEL --config CONFIG --max-num-seqs 9": lambda config, *_: (
        config.scheduler_config.max_num_seqs == 9
    ),
    "vllm serve MODEL -O3": lambda config, *_: config.optimization_level == 3,
    """vllm serve MODEL --compilation-config '{"mode": 3, "cudagraph_capture_sizes": [1, 2]}'""": (
        lambda _, args, __: args.compilation_config.cudagraph_capture_sizes == [1, 2]
    ),
    "vllm serve MODEL -cc.mode=3 --compilation-config.custom_ops+=none": lambda _, args, __: (
        args.compilation_config.custom_ops == ["none"]
    ),
    "vllm serve MODEL --generation-config vllm --seed 42": lambda config, *_: (
        (config.model_config.generation_config, config.model_config.seed) == ("vllm", 42)
    ),
    "vllm serve MODEL --enable-prefix-caching --enable-chunked-prefill --max-num-seqs 8": lambda config, *_: (
        config.cache_config.enable_prefix_caching and config.scheduler_config.max_num_seqs == 8
    ),
    "vllm serve MODEL --no-enable-prefix-caching --max-num-batched-tokens 512 --enforce-eager": (
        lambda config, *_: not config.cache_config.enable_prefix_caching
    ),
    "vllm serve MODEL --kv-cache-dtype auto --block-size 32 --gpu-memory-utilization 0.9": (
        lambda config, *_: config.cache_config.block_size == 32
    ),
    """vllm serve MODEL --hf-overrides '{"max_position_embeddings": 200}'""": lambda config, *_: (
        config.model_config.max_model_len == 200
    ),
    """vllm serve MODEL --limit-mm-per-prompt '{"image": 2, "video": 0}' --trust-remote-code""": (
        lambda config, *_: config.model_config.trust_remote_code
    ),
    """vllm serve MODEL --override-generation-config '{"temperature": 0.0}'""": lambda config, *_: (
        config.model_config.override_generation_config == {"temperature": 0.0}
    ),
    "vllm serve MODEL --disable-log-stats --enable-log-requests --max-log-len 100": lambda _, args, __: (
        args.disable_log_stats and args.enable_log_requests
    ),
    """vllm serve MODEL --speculative-config """
    """'{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'""": lambda config, *_: (
        config.speculative_config.num_speculative_tokens == 3
    ),
    "vllm serve MODEL --structured-outputs-config.backend guidance": lambda config, *_: (
        config.structured_outputs_config.backend == "guidance"
    ),
    "vllm serve MODEL -tp 1 -pp 1 --tokenizer MODEL --load-format auto --download-dir /tmp/models": (
        lambda config, *_: config.load_config.download_dir == "/tmp/models"
    ),
    "vllm serve MODEL --scheduling-policy priority --max-logprobs 5 --logprobs-mode raw_logits": (
        lambda config, *_: config.scheduler_config.policy == "priority"
    ),
    """vllm serve MODEL --allowed-origins '["https://app.example.org"]' --root-path /llm """
    """--disable-fastapi-docs --uvicorn-log-level warning --disable-access-log-for-endpoints /ping""": (
        lambda _, args, __: args.root_path == "/llm"
    ),
}
"""Command lines, and what is seen of them."""
REFUSED = {
    "vllm serve MODEL --api-server-count 4": "--api-server-count is not supported: one process answers",
    "vllm serve MODEL --headless --data-parallel-size 2": "--headless is not supported",
    "vllm serve MODEL --grpc": "--grpc is not supported: the server speaks HTTP",
    "vllm serve MODEL --enable-sleep-mode": "--enable-sleep-mode frees memory of a GPU",
    "vllm serve MODEL --tool-server demo": "--tool-server is not supported: vLLM calls tools itself",
    "vllm serve MODEL --nnodes 2 --node-rank 1": "--nnodes is not supported: over machines",
    "vllm serve MODEL --enable-auto-tool-choice": "--enable-auto-tool-choice requires --tool-call-parser",
    "vllm serve MODEL --worker-cls mine.Worker": "--worker-cls is not supported: interventions need",
    "vllm serve --config ABSENT": "there is no file",
}
"""Command lines that are refused, and the reason."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what stands for the names in capitals."""
    folder = tmp_path_factory.mktemp("drop_in")
    model = write_checkpoint("llama", folder / "tiny")
    (folder / "template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    options = {"model": str(model), "port": 8123, "served-model-name": ["tiny"], "max-num-seqs": 7}
    (folder / "config.yaml").write_text(yaml.safe_dump(options))
    return {
        "MODEL": str(model),
        "TEMPLATE": str(folder / "template.jinja"),
        "CONFIG": str(folder / "config.yaml"),
        "ABSENT": str(folder / "absent.yaml"),
    }


def ours(line: str, places: dict[str, str]) -> list[str]:
    """Return the arguments of this project's command for vLLM's."""
    program, command, *arguments = shlex.split(line)
    assert program == "vllm"
    return [command, *(places.get(one, one) for one in arguments)]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[VllmConfig, argparse.Namespace, Settings]]:
    """Collect what servers are started with, instead of starting them."""
    found = []

    def start(args: argparse.Namespace, settings: Settings, *_: object) -> None:
        HttpOptions.of(args)
        listening_options(args)
        log_options(args)
        arguments = engine_arguments(args, settings)
        config = arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
        check_supported(config)
        found.append((config, args, settings))

    monkeypatch.setattr(serve, "_run_server", start)
    monkeypatch.setattr(serve, "start_logs", lambda _: None)  # they are of the whole process
    return found


@pytest.mark.parametrize("line", LINES)
def test_it_is_understood(
    line: str,
    places: dict[str, str],
    started: list[tuple[VllmConfig, argparse.Namespace, Settings]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(ours(line, places)) == 0, capsys.readouterr().err
    ((config, args, settings),) = started
    assert LINES[line](config, args, settings)
    assert config.parallel_config.worker_cls.startswith("nnsight_engine.")


@pytest.mark.parametrize("line", REFUSED)
def test_it_is_refused_with_the_reason(
    line: str, places: dict[str, str], started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(ours(line, places)) == 1
    assert REFUSED[line] in capsys.readouterr().err
    assert not started
