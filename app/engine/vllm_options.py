"""Options of vLLM's ``serve`` that are refused, with an alternative, and checks before vLLM is imported.

Accepted and ignored, ``--api-key`` would leave a server open that its operator believes closed: a test asks
of every option whether it is passed to the engine, handled here, or refused.

The import of vLLM takes up to a minute, so ``recorded_options.json`` has its options; a test compares it with
vLLM's parser, and ``python -m tests.unit.app.vllm_option_record`` writes it. The rest is left to that parser.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from app.process_environment import ADAPTER_UPDATES, may_update_adapters, vllm_key
from nnsight_engine.core.errors import UnsupportedOptionError

_PROXY: Final = "use a proxy in front of the server for it (docs/deploying.md)"
_NO_ROUTE: Final = "its routes are not served here"
_REPLICAS: Final = "run several servers with --replicas N"
_ONE_MACHINE: Final = f"the engines of --data-parallel-size run on one machine; over machines {_REPLICAS}"
_ADAPTERS: Final = "adapters are for whole projections of text models (docs/lora.md); leave it out"
_SLEEP: Final = "--enable-sleep-mode moves the weights and discards the KV cache, and no more; leave it out"

REFUSED: Final[Mapping[str, str]] = types.MappingProxyType(
    {
        "aggregate_engine_logging": "there is one engine; leave it out",
        "headless": f"only whole servers are started; {_REPLICAS}",
        "api_server_count": f"one process answers; {_REPLICAS}",
        **dict.fromkeys(("grpc", "grpc_port"), "the server speaks HTTP; leave it out"),
        **dict.fromkeys(
            ("nnodes", "node_rank"),
            "over machines a model is served by --distributed-executor-backend ray",
        ),
        **dict.fromkeys(
            (
                "data_parallel_address",
                "data_parallel_backend",
                "data_parallel_external_lb",
                "data_parallel_hybrid_lb",
                "data_parallel_multi_port_external_lb",
                "data_parallel_rank",
                "data_parallel_rpc_port",
                "data_parallel_start_rank",
                "data_parallel_supervisor_port",
                "dp_supervisor_probe_failure_threshold",
                "dp_supervisor_probe_interval_s",
                "dp_supervisor_probe_timeout_s",
                "elastic_ep_max_dp_size",
                "enable_elastic_ep",
            ),
            _ONE_MACHINE,
        ),
        **dict.fromkeys(
            (
                "default_mm_loras",
                "enable_mixed_moe_lora_format",
                "enable_moe_shared_loras",
                "enable_tower_connector_lora",
                "fully_sharded_loras",
                "max_lora_cls_labels",
            ),
            _ADAPTERS,
        ),
        "tool_server": (
            "vLLM calls tools itself for gpt-oss alone, which is none of the supported families "
            "(docs/points.md); tools are called by the client"
        ),
        **dict.fromkeys(("sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names"), _SLEEP),
        **dict.fromkeys(
            (
                "cohere_is_reasoning_model",
                "cohere_format",
                "tokens_only",
                "enable_scale_out",
                "enable_flash_late_interaction",
                "io_processor_plugin",
                "profiler_config",
                "weight_transfer_config",
            ),
            f"{_NO_ROUTE}; leave it out",
        ),
    }
)
"""The alternative to each refused option, by the argument's name."""


_MAY_HAVE_NO_EFFECT: Final = frozenset({"api_server_count", "nnodes", "node_rank"})
"""Numeric options with a value that has no effect; the value, not only the name, decides."""


def refuse_named(options: Sequence[str]) -> None:
    """Refuse options by their names alone, before the import of vLLM, which parses the others."""
    for option in options:
        flag = option.partition("=")[0].replace("_", "-")
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in REFUSED and name not in _MAY_HAVE_NO_EFFECT:
            raise UnsupportedOptionError(f"{flag} is not supported: {REFUSED[name]}")


_OF_ONE_SERVER: Final = (
    "--allow-credentials", "--allowed-headers", "--allowed-methods", "--allowed-origins",
    "--disable-access-log-for-endpoints", "--disable-fastapi-docs", "--disable-uvicorn-access-log",
    "--enable-offline-docs", "--enable-ssl-refresh", "--h11-", "--middleware", "--root-path", "--ssl-",
    "--uds", "--uvicorn-log-level",
)  # fmt: skip
"""Beginnings of options that the front of replicas would have to honour."""


def refuse_with_replicas(options: Sequence[str]) -> None:
    """Refuse options that only a server of its own has: keys, and how requests are received."""
    refuse_named(options)
    if may_update_adapters():
        raise UnsupportedOptionError(
            f"{ADAPTER_UPDATES} is not supported with replicas: a request to load an adapter reaches one of "
            "them; give adapters at the start, --lora-modules"
        )
    names = [option.partition("=")[0].replace("_", "-") for option in options]
    key_option = "VLLM_API_KEY" if vllm_key() else ""
    if "--api-key" in names:
        key_option = "--api-key"
    if key_option:
        raise UnsupportedOptionError(
            f"{key_option} is not supported: replicas share the keys of their database, which "
            "`nnsight-engine keys create` makes (docs/keys.md)"
        )
    server_option = next((name for name in names if name.startswith(_OF_ONE_SERVER)), None)
    if server_option is not None:
        raise UnsupportedOptionError(
            f"{server_option} is not supported: with replicas the front answers, at --host and --port; "
            f"{_PROXY}"
        )


def refuse_ignored(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raise UnsupportedOptionError for options, also of a config file, that would have no effect."""
    for action in parser._actions:  # noqa: SLF001 - has no public name
        name = action.dest
        value = getattr(args, name, None)
        if name not in REFUSED or not _is_given(value, action):
            continue
        if name in _MAY_HAVE_NO_EFFECT - {"node_rank"} and value == 1:
            continue
        raise UnsupportedOptionError(f"{_flag(action)} is not supported: {REFUSED[name]}")


def _is_given(value: Any, action: argparse.Action) -> bool:
    """Return whether a value has an effect; ``--no-enable-lora``, whose default is None, has none."""
    return value != action.default and bool(value or action.default)


def _flag(action: argparse.Action) -> str:
    return next((option for option in action.option_strings if option.startswith("--")), action.dest)


RECORD: Final = Path(__file__).with_name("recorded_options.json")

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)([kmgt])", re.IGNORECASE)
_POWERS: Final = "kmgt"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UnsupportedOptionError(message)


def parse_recorded(arguments: Sequence[str], own_flags: Iterable[str] = ()) -> argparse.Namespace:
    """Return the values of vLLM's options as far as they can be told without vLLM; others are None.

    Raises UnsupportedOptionError for unknown options, for which ``own_flags`` are suggested too, and wrong
    kinds of values.
    """
    options = json.loads(RECORD.read_text(encoding="utf-8"))
    parser = _Parser(add_help=False)
    for option in options:
        if option.get("nargs") == 0:
            parser.add_argument(*option["flags"], action="store_true", default=None)
        else:
            parser.add_argument(*option["flags"], nargs=option.get("nargs"), type=_value_reader(option))
    flags = [flag for option in options for flag in option["flags"]]
    args, unknown = parser.parse_known_args(_with_dashes(arguments, flags))
    if unknown:
        _refuse_unknown(unknown[0], [*own_flags, *flags])
    return args


def _refuse_unknown(argument: str, known: Sequence[str]) -> NoReturn:
    if not argument.startswith("-"):
        raise UnsupportedOptionError(
            f"unexpected argument {argument!r}: MODEL, a single one, comes before the options"
        )
    name = argument.partition("=")[0]
    similar = difflib.get_close_matches(name, known, n=1)
    hint = (
        f"did you mean {similar[0]}?"
        if similar
        else "serve --help and vllm serve --help=all list the options"
    )
    raise UnsupportedOptionError(f"there is no option {name}; {hint}")


def _with_dashes(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the arguments in the form of argparse: dashes in names, no keys of JSON options."""
    plain: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, _ = argument.partition("=")
        base, _, key = name.partition(".")
        base = base.replace("_", "-") if base.startswith("--") else base
        if argument.startswith("-O") or (key and base in flags):
            if argument == "-O" or (key and not equals):
                next(remaining, None)
            continue
        plain.append(f"{base}{argument[len(base) :]}" if argument.startswith("--") else argument)
    return plain


def _value_reader(option: dict[str, Any]) -> Callable[[str], Any]:
    """Return argparse's converter for a recorded option; what vLLM itself has to decide becomes None."""
    kind, choices = option.get("kind", "text"), option.get("choices")
    convert, words = _KINDS[kind]

    def read(text: str) -> Any:
        if text in {"", "None", "auto"} and not choices:
            return None
        try:
            value = convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"it must be {words}, got {text!r}") from None
        if choices and value not in choices:
            similar = difflib.get_close_matches(text, map(str, choices), n=1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            raise argparse.ArgumentTypeError(
                f"it must be one of {', '.join(map(str, choices))}, got {text!r}{hint}"
            )
        return value

    return read


def _size(text: str) -> int:
    """Return a number such as ``25.6k`` or ``4K``, which are 25600 and 4096."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return int(text)
    power = _POWERS.index(match[2].lower()) + 1
    return int(float(match[1]) * (1000 if match[2].islower() else 1024) ** power)


_KINDS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "text": (str, "a text"),
    "integer": (int, "a whole number"),
    "number": (float, "a number"),
    "size": (_size, "a whole number, such as 4096 or 4k"),
}
"""The conversion of each kind of value, and its name in messages."""
