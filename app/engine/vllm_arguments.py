"""Conversion of the command line to vLLM's own arguments, with our defaults for those not given."""

from __future__ import annotations

import argparse
from typing import Final

import torch
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from app.engine.vllm_options import refuse_ignored
from nnsight_engine.core.errors import UnsupportedOptionError

_WITHOUT_BF16: Final = "AVX2"
"""torch's name for x86 processors without AVX-512, where a matmul in bfloat16 is about ten times slower."""


def parse(arguments: list[str], *, compiles: bool = False) -> argparse.Namespace:
    """Return vLLM's parsed ``serve`` arguments.

    ``--dtype auto`` is float32 on processors without kernels for bfloat16.

    Args:
        arguments: The model, then options.
        compiles: Whether the engine is compiled on CPU too. Compiling takes about a minute at every start,
            more than most uses on CPU gain by it.

    Raises:
        UnsupportedOptionError: An option would be ignored, or would replace what interventions need.
    """
    parser = make_arg_parser(FlexibleArgumentParser(prog="nnsight-engine serve"))
    args: argparse.Namespace = parser.parse_args(arguments)
    refuse_ignored(args, parser)
    validate_parsed_serve_args(args)
    args.model = args.model_tag
    for option in ("worker_cls", "scheduler_cls"):
        if getattr(args, option) not in {None, False, "auto"}:
            flag = f"--{option.replace('_', '-')}"
            raise UnsupportedOptionError(
                f"{flag} is not supported: interventions need their own; start without it"
            )
    if current_platform.is_cpu() and not compiles:
        args.enforce_eager = True
    has_bf16 = not current_platform.is_cpu() or torch.backends.cpu.get_cpu_capability() != _WITHOUT_BF16
    if args.dtype == "auto" and not has_bf16:
        args.dtype = "float32"
    return args
