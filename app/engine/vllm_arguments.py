"""Conversion of the command line to vLLM's own arguments, with our defaults for those not given."""

from __future__ import annotations

import argparse
import re
from itertools import pairwise
from typing import Final, NoReturn

import torch
from pydantic import ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.exceptions import VLLMClientError
from vllm.platforms import current_platform
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from api_schemas.errors import excerpt
from api_schemas.fields import NAME_PATTERN, NAME_RULE
from app.engine.vllm_options import refuse_ignored
from app.settings import Settings
from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.vllm_backend.compat import EngineLimits, engine_options

_MEDIA_PER_PROMPT: Final = {"image": 8, "audio": 4, "video": 1}
"""The most of each unless ``--limit-mm-per-prompt`` says otherwise. They are decoded in this process."""
_WITHOUT_BF16: Final = "AVX2"
"""torch's name for x86 processors without AVX-512, where a matmul in bfloat16 is about ten times slower."""


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UnsupportedOptionError(message)


def parse(arguments: list[str], *, compiles: bool = False) -> argparse.Namespace:
    """Return vLLM's parsed ``serve`` arguments, the model first; raises UnsupportedOptionError.

    ``--dtype auto`` is float32 on processors without kernels for bfloat16. ``compiles``: the engine is
    compiled on CPU too, which takes about a minute at every start, more than most uses on CPU gain by it.
    """
    parser = make_arg_parser(_Parser(prog="nnsight-engine serve"))
    args: argparse.Namespace = parser.parse_args(arguments)
    refuse_ignored(args, parser)
    _check_before_load(args)
    args.model = args.model_tag
    for option in ("worker_cls", "scheduler_cls"):
        if getattr(args, option) not in {None, False, "auto"}:
            flag = f"--{option.replace('_', '-')}"
            raise UnsupportedOptionError(
                f"{flag} is not supported: interventions need their own; start without it"
            )
    args.limit_mm_per_prompt = {**_MEDIA_PER_PROMPT, **args.limit_mm_per_prompt}
    if current_platform.is_cpu() and not compiles:
        args.enforce_eager = True
    has_bf16 = not current_platform.is_cpu() or torch.backends.cpu.get_cpu_capability() != _WITHOUT_BF16
    if args.dtype == "auto" and not has_bf16:
        args.dtype = "float32"
    return args


def engine_arguments(args: argparse.Namespace, settings: Settings) -> AsyncEngineArgs:
    """Return the engine's arguments: those of the command line, and what interventions need."""
    limits = EngineLimits(
        settings.max_capture_bytes_per_request,
        settings.max_capture_bytes_engine,
        max_work=settings.max_work,
        loaded_dictionary_bytes=settings.loaded_dictionary_bytes,
        trace_step_s=settings.trace_step_s,
        max_trace_bytes=settings.max_trace_bytes,
        sandbox=settings.sandbox,
        sandbox_bytes=settings.sandbox_bytes,
        sandbox_step_s=settings.sandbox_step_s,
        sandbox_needs_namespaces=settings.sandbox_needs_namespaces,
        max_sandboxes=settings.max_sandboxes,
        fair_window_s=settings.fair_window_s,
        taps=settings.taps,
        intervention_graphs=settings.intervention_graphs,
        points=settings.points,
    )
    options = engine_options(limits)
    options["additional_config"] = {
        **(args.additional_config or {}),
        **options["additional_config"],
    }
    for name, value in options.items():
        setattr(args, name, value)
    return AsyncEngineArgs.from_cli_args(args)


def model_of_file(path: str) -> str | None:
    """Return the model that a file of options names, if it does; raises UnsupportedOptionError."""
    try:
        options = FlexibleArgumentParser().load_config_file(path)
    except Exception as error:  # also those of YAML
        raise UnsupportedOptionError(f"--config {path} cannot be read: {error}") from error
    return dict(pairwise(options)).get("--model")


def message_of(error: Exception) -> str:
    """Return the first sentence of an error of vLLM's checks: of pydantic's errors the first message."""
    if isinstance(error, ValidationError):
        return str(error.errors(include_url=False)[0]["msg"]).removeprefix("Value error, ")
    return str(error.args[0] if isinstance(error, KeyError) else error)


def _check_before_load(args: argparse.Namespace) -> None:
    """Import the parsers that plugins add, and check what vLLM's server checks before it loads the model."""
    if args.lora_modules and not args.enable_lora:
        raise UnsupportedOptionError("--lora-modules needs --enable-lora; add it")
    for module in args.lora_modules or ():
        if re.fullmatch(NAME_PATTERN, module.name) is None:
            raise UnsupportedOptionError(
                f"--lora-modules takes names of {NAME_RULE}, got {excerpt(module.name)}"
            )
    if args.enable_sleep_mode and not current_platform.is_sleep_mode_available():
        raise UnsupportedOptionError(
            "--enable-sleep-mode frees memory of a GPU, and vLLM has none here that can; leave it out: "
            "POST /sleep?level=0 pauses without it"
        )
    try:
        validate_parsed_serve_args(args)
        if args.tool_parser_plugin:
            ToolParserManager.import_tool_parser(args.tool_parser_plugin)
        if args.reasoning_parser_plugin:
            ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
        validate_api_server_args(args)
    except (ImportError, KeyError, OSError, TypeError, ValueError, VLLMClientError) as error:
        raise UnsupportedOptionError(message_of(error)) from error
