"""Every option of vLLM's ``serve``: passed to the engine, handled here, or refused with an alternative.

Accepted and ignored, ``--api-key`` would leave a server open that its operator believes closed. An option
that is in none of these tables is refused too, and a test fails when a new version of vLLM adds one.

The import of vLLM takes up to a minute, so ``recorded_options.json`` has the options of the tested version; a
test compares it with the installed one, and ``python -m tests.unit.app.vllm_option_record`` writes it. The
rest is left to vLLM's own parser.
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

TO_ENGINE: Final = frozenset(
    [
        "additional_config",
        "all2all_backend",
        "allow_deprecated_quantization",
        "allowed_local_media_path",
        "allowed_media_domains",
        "async_scheduling",
        "attention_backend",
        "attention_config",
        "aux_output_config",
        "block_size",
        "code_revision",
        "collect_detailed_traces",
        "compilation_config",
        "config_format",
        "convert",
        "cp_kv_cache_interleave_size",
        "cpu_distributed_timeout_seconds",
        "cpu_offload_gb",
        "cpu_offload_params",
        "cudagraph_capture_sizes",
        "cudagraph_metrics",
        "custom_histogram_buckets",
        "data_parallel_size",
        "data_parallel_size_local",
        "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold",
        "dcp_comm_backend",
        "dcp_kv_cache_interleave_size",
        "dcp_q_replicate",
        "decode_context_parallel_size",
        "device_ids",
        "diffusion_config",
        "disable_cascade_attn",
        "disable_chunked_mm_input",
        "disable_custom_all_reduce",
        "disable_hybrid_kv_cache_manager",
        "disable_log_stats",
        "disable_nccl_for_dp_synchronization",
        "disable_sliding_window",
        "distributed_executor_backend",
        "distributed_timeout_seconds",
        "download_dir",
        "dp_sync_interval",
        "dtype",
        "ec_manager_config",
        "ec_transfer_config",
        "enable_batch_sharded_sampling",
        "enable_chunked_prefill",
        "enable_cumem_allocator",
        "enable_dbo",
        "enable_ep_weight_filter",
        "enable_eplb",
        "enable_expert_parallel",
        "enable_fault_tolerance",
        "enable_flashinfer_autotune",
        "enable_hc_sp",
        "enable_layerwise_nvtx_tracing",
        "enable_log_requests",
        "enable_logging_iteration_details",
        "enable_lora",
        "enable_mamba_cache_stochastic_rounding",
        "enable_mamba_shared_prefix_checkpoint",
        "enable_mfu_metrics",
        "enable_mm_embeds",
        "enable_nccl_comm_suspend",
        "enable_prefix_caching",
        "enable_prompt_embeds",
        "enable_return_routed_experts",
        "enable_shm_tensor_arena",
        "enable_sleep_mode",
        "enable_trace_replay",
        "enforce_eager",
        "engram_config",
        "eplb_config",
        "expert_placement_strategy",
        "fail_on_environ_validation",
        "fault_tolerance_config",
        "gdn_prefill_backend",
        "generation_config",
        "gpu_memory_utilization",
        "hf_config_path",
        "hf_overrides",
        "hf_token",
        "ignore_patterns",
        "interleave_mm_strings",
        "ir_op_priority",
        "jit_monitor_mode",
        "jit_monitor_verbose",
        "kda_decode_backend",
        "kda_prefill_backend",
        "kernel_config",
        "kv_cache_dtype",
        "kv_cache_dtype_skip_layers",
        "kv_cache_memory_bytes",
        "kv_cache_metrics",
        "kv_cache_metrics_sample",
        "kv_events_config",
        "kv_offloading_backend",
        "kv_offloading_size",
        "kv_sharing_fast_prefill",
        "kv_transfer_config",
        "language_model_only",
        "limit_mm_per_prompt",
        "linear_backend",
        "load_format",
        "log_config_file",
        "log_level",
        "logging_config",
        "logits_processors",
        "logprobs_mode",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "lora_dtype",
        "lora_target_modules",
        "mamba_backend",
        "mamba_block_size",
        "mamba_cache_dtype",
        "mamba_cache_mode",
        "mamba_cache_philox_rounds",
        "mamba_ssm_cache_dtype",
        "mamba_ssu_algorithm",
        "master_addr",
        "master_port",
        "max_cpu_loras",
        "max_cudagraph_capture_size",
        "max_logprobs",
        "max_lora_rank",
        "max_loras",
        "max_model_len",
        "max_num_active_seqs",
        "max_num_batched_tokens",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "max_num_scheduled_tokens",
        "max_num_seqs",
        "max_parallel_loading_workers",
        "media_io_kwargs",
        "mm_device_do_normalize",
        "mm_encoder_attn_backend",
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",
        "mm_encoder_fp8_scale_save_margin",
        "mm_encoder_fp8_scale_save_path",
        "mm_encoder_only",
        "mm_encoder_tp_mode",
        "mm_hasher_algorithm",
        "mm_ipc_gpu_memory_gb",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_processor_device",
        "mm_processor_kwargs",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
        "model",
        "model_class_overrides",
        "model_impl",
        "model_loader_extra_config",
        "moe_backend",
        "num_gpu_blocks_override",
        "numa_bind",
        "numa_bind_cpus",
        "numa_bind_nodes",
        "offload_backend",
        "offload_group_size",
        "offload_num_in_group",
        "offload_params",
        "offload_prefetch_step",
        "optimization_level",
        "otlp_traces_endpoint",
        "override_generation_config",
        "per_request_spec_decode_metrics",
        "performance_mode",
        "pipeline_parallel_size",
        "pooler_config",
        "prefill_context_parallel_size",
        "prefill_schedule_interval",
        "prefix_cache_retention_interval",
        "prefix_caching_hash_algo",
        "prefix_match_unit",
        "pt_load_map_location",
        "quantization",
        "quantization_config",
        "ray_workers_use_nsight",
        "reasoning_config",
        "reasoning_parser",
        "reasoning_parser_plugin",
        "renderer_num_workers",
        "replayssm_buffer_len",
        "return_sampling_mask",
        "revision",
        "runner",
        "safetensors_load_strategy",
        "safetensors_prefetch_block_size",
        "safetensors_prefetch_num_threads",
        "scheduler_cls",
        "scheduler_reserve_full_isl",
        "scheduling_policy",
        "seed",
        "served_model_name",
        "show_hidden_metrics_for_version",
        "shutdown_timeout",
        "skip_mm_profiling",
        "skip_tokenizer_init",
        "sparse_indexer_topk_backend",
        "spec_method",
        "spec_model",
        "spec_tokens",
        "specialize_active_lora",
        "speculative_config",
        "stream_interval",
        "structured_outputs_config",
        "swa_bounded_replay",
        "tensor_parallel_size",
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
        "trust_remote_code",
        "ubatch_size",
        "use_fp64_gumbel",
        "use_replayssm",
        "use_tqdm_on_load",
        "video_pruning_method",
        "video_pruning_rate",
        "watermark",
        "watermark_config",
        "worker_cls",
        "worker_extension_cls",
    ]
)
"""Arguments of the engine: ``AsyncEngineArgs`` takes them; ``check_supported`` refuses some of them."""

HANDLED_HERE: Final = frozenset(
    [
        "allow_credentials",
        "allowed_headers",
        "allowed_methods",
        "allowed_origins",
        "anthropic_disabled_thinking_effort",
        "api_key",
        "chat_template",
        "chat_template_content_format",
        "config",
        "default_chat_template_kwargs",
        "disable_access_log_for_endpoints",
        "disable_fastapi_docs",
        "disable_uvicorn_access_log",
        "enable_auto_tool_choice",
        "enable_force_include_usage",
        "enable_log_deltas",
        "enable_log_outputs",
        "enable_offline_docs",
        "enable_per_request_metrics",
        "enable_prompt_tokens_details",
        "enable_request_id_headers",
        "enable_server_load_tracking",
        "enable_ssl_refresh",
        "enable_tokenizer_info_endpoint",
        "exclude_tools_when_tool_choice_none",
        "fingerprint_mode",
        "fingerprint_value",
        "h11_max_header_count",
        "h11_max_incomplete_event_size",
        "help",
        "host",
        "log_error_stack",
        "lora_modules",
        "max_log_len",
        "middleware",
        "model_tag",
        "port",
        "response_role",
        "return_tokens_as_token_ids",
        "root_path",
        "sse_keep_alive_interval",
        "ssl_ca_certs",
        "ssl_cert_reqs",
        "ssl_certfile",
        "ssl_ciphers",
        "ssl_keyfile",
        "tool_call_parser",
        "tool_parser_plugin",
        "tool_strict_level",
        "trust_request_chat_template",
        "trust_request_mm_kwargs",
        "uds",
        "uvicorn_log_level",
    ]
)
"""Options handled in this process: by the parser, the command line and vLLM's serving classes."""

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
    given = "--api-key" if "--api-key" in names else "VLLM_API_KEY" if vllm_key() else ""
    if given:
        raise UnsupportedOptionError(
            f"{given} is not supported: replicas share the keys of their database, which "
            "`nnsight-engine keys create` makes (docs/keys.md)"
        )
    of_one = next((one for one in names if one.startswith(_OF_ONE_SERVER)), None)
    if of_one is not None:
        raise UnsupportedOptionError(
            f"{of_one} is not supported: with replicas the front answers, at --host and --port; {_PROXY}"
        )


def refuse_ignored(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raise UnsupportedOptionError for options, also of a config file, that would have no effect."""
    for action in parser._actions:  # noqa: SLF001 - has no public name
        name = action.dest
        value = getattr(args, name, None)
        if name in TO_ENGINE or name in HANDLED_HERE or not _is_given(value, action):
            continue
        if name in _MAY_HAVE_NO_EFFECT - {"node_rank"} and value == 1:
            continue
        instead = REFUSED.get(name, "this version does not know it; leave it out")
        raise UnsupportedOptionError(f"{_flag(action)} is not supported: {instead}")


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


def parse_recorded(
    arguments: Sequence[str], own: Iterable[str] = (), *, is_complete: bool = True
) -> argparse.Namespace:
    """Return the values of vLLM's options as far as they can be told without vLLM; others are None.

    ``is_complete``: the installed vLLM is the recorded version; if not, nothing is refused. Raises
    UnsupportedOptionError for unknown options and wrong kinds of values.
    """
    options = json.loads(RECORD.read_text(encoding="utf-8"))
    parser = _Parser(add_help=False)
    for one in options:
        if one.get("nargs") == 0:
            parser.add_argument(*one["flags"], action="store_true", default=None)
        else:
            parser.add_argument(*one["flags"], nargs=one.get("nargs"), type=_reader(one))
    flags = [flag for one in options for flag in one["flags"]]
    try:
        args, unknown = parser.parse_known_args(_plain(arguments, flags))
        if unknown:
            _refuse(unknown[0], [*own, *flags])
    except UnsupportedOptionError:
        if is_complete:
            raise
        return parser.parse_args([])
    return args


def _refuse(argument: str, known: Sequence[str]) -> NoReturn:
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


def _plain(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the arguments in the form of argparse: dashes in names, no keys of JSON options."""
    plain: list[str] = []
    rest = iter(arguments)
    for one in rest:
        name, equals, _ = one.partition("=")
        base, _, key = name.partition(".")
        base = base.replace("_", "-") if base.startswith("--") else base
        if one.startswith("-O") or (key and base in flags):
            if one == "-O" or (key and not equals):
                next(rest, None)
            continue
        plain.append(f"{base}{one[len(base) :]}" if one.startswith("--") else one)
    return plain


def _reader(option: dict[str, Any]) -> Callable[[str], Any]:
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
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return int(text)
    power = _POWERS.index(found[2].lower()) + 1
    return int(float(found[1]) * (1000 if found[2].islower() else 1024) ** power)


_KINDS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "text": (str, "a text"),
    "integer": (int, "a whole number"),
    "number": (float, "a number"),
    "size": (_size, "a whole number, such as 4096 or 4k"),
}
"""The conversion of each kind of value, and its name in messages."""
