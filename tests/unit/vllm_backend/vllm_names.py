"""The names of vLLM that this project overrides or reads, which ``vllm_sources`` compares with sources.

Left out are the public names of the package ``vllm`` itself, fields of request models in the server, and the
modules of single models, which ``families`` looks up in the loaded model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_NONE: Final[Mapping[str, str]] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class UsedNames:
    """Names of ``owners``, each ``module`` or ``module:Class``; signatures are without ``self``.

    A called function's has the arguments that are passed, with a default for those that are passed only
    sometimes. An overridden method's has ``**others`` if the override passes on parameters that it does not
    know. ``implemented`` are abstract methods.
    """

    owners: tuple[str, ...]
    read: tuple[str, ...]
    called: Mapping[str, str]
    overridden: Mapping[str, str]
    implemented: tuple[str, ...]
    is_subclassed: bool


def _used(
    *owners: str,
    read: str = "",
    called: Mapping[str, str] = _NONE,
    overridden: Mapping[str, str] | None = None,
    implemented: str = "",
) -> UsedNames:
    """Return names: strings have spaces between them, a class without subclasses has no ``overridden``."""
    is_subclassed = overridden is not None
    return UsedNames(
        owners, tuple(read.split()), called, overridden or _NONE, tuple(implemented.split()), is_subclassed
    )


_WORKER: Final = (
    _used(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
        "vllm.v1.worker.cpu.model_runner:CPUModelRunner",
        read="compilation_config cudagraph_manager device model model_state prompt_logprobs_worker "
        "uses_inputs_embeds vllm_config",
        called={"_dummy_run": "num_tokens", "_init_kv_zero_meta": "", "add_lora": "lora_request"},
        overridden={
            "load_model": "load_dummy_weights=False, **others",
            "load_lora_model": "model, vllm_config, device",
            "_set_active_loras": "prompt_lora_mapping, token_lora_mapping, lora_requests, **others",
            "execute_model": "scheduler_output, intermediate_tensors=None, *, dummy_run=False, **others",
            "capture_model": "*, profile_only=False",
            "profile_cudagraph_memory": "",
            "shutdown": "",
            "prepare_inputs": "scheduler_output, batch_req_state, batch_desc, num_active_loras, **others",
            "sample": "hidden_states, input_batch, grammar_output",
            "sample_tokens": "grammar_output",
            "pool": "",
        },
    ),
    _used(
        "vllm.v1.worker.gpu.input_batch:InputBatch",
        read="idx_mapping_np input_ids num_computed_tokens_np num_draft_tokens num_draft_tokens_per_req "
        "num_scheduled_tokens num_tokens num_tokens_after_padding prefill_len_np req_ids",
    ),
    _used(
        "vllm.v1.worker.gpu.model_states.interface:ModelState",
        read="encoder_cache encoder_runner",
        called={"execute_mm_encoder": "scheduled_encoder_inputs"},
    ),
    _used("vllm.v1.worker.gpu.mm.encoder_runner:EncoderRunner", read="cudagraph_manager"),
    _used("vllm.v1.worker.gpu.mm.encoder_cache:EncoderCache", read="mm_features"),
    _used(
        "vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker",
        read="in_progress_prompt_logprobs uses_prompt_logprobs",
    ),
    _used(
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager",
        read="use_breakable_cg",
        called={
            "dispatch": "num_reqs, num_tokens, uniform_token_count, *, num_active_loras, max_query_len, "
            "num_ubatches=1"
        },
    ),
    _used(
        "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager",
        read="aux_hidden_states capture compilation_config cudagraph_mode decode_query_len device "
        "hidden_states intermediate_tensors lora_capture_cases varlen_decode vllm_config",
        called={
            "__init__": "vllm_config, device, cudagraph_mode, decode_query_len, *, lora_capture_cases, "
            "varlen_decode",
            "captured_token_counts": "",
            "run_fullgraph": "desc",
        },
    ),
    _used("vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor", read="cg_mode num_reqs num_tokens"),
    _used(
        "vllm.v1.worker.gpu_worker:Worker",
        "vllm.v1.worker.cpu_worker:CPUWorker",
        read="device model_runner vllm_config",
        called={"add_lora": "lora_request", "remove_lora": "lora_id"},
        overridden={
            "init_device": "",
            "initialize_from_config": "kv_cache_config",
            "compile_or_warm_up_model": "",
            "execute_model": "scheduler_output",
        },
    ),
    _used(
        "vllm.forward_context",
        called={
            "get_forward_context": "",
            "set_forward_context": "attn_metadata, vllm_config, *, num_tokens, skip_compiled",
        },
    ),
    _used(
        "vllm.forward_context:ForwardContext",
        read="additional_kwargs attn_metadata cudagraph_runtime_mode skip_compiled",
    ),
    _used("vllm.sequence:IntermediateTensors", called={"__init__": "tensors"}, read="tensors"),
    _used("vllm.v1.outputs", read="DraftTokenIds EMPTY_MODEL_RUNNER_OUTPUT ModelRunnerOutput"),
    _used(
        "vllm.v1.outputs:AsyncModelRunnerOutput",
        called={"get_output": ""},
        overridden={},
        implemented="get_output",
    ),
    _used(
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding",
        called={"forward_native": "positions, query, key"},
        overridden={"forward_cpu": "positions, query, key=None"},
    ),
    _used("vllm.v1.outputs:ModelRunnerOutput", read="prompt_logprobs_dict req_id_to_index sampled_token_ids"),
    _used("vllm.v1.outputs:SamplerOutput", read="logprobs_tensors sampled_token_ids"),
    _used("vllm.v1.outputs:LogprobsTensors", read="logprob_token_ids logprobs selected_token_ranks"),
    _used(
        "vllm.utils.torch_utils",
        called={"direct_register_custom_op": "op_name, op_func, *, mutates_args, fake_impl, target_lib"},
    ),
    _used("vllm.utils.import_utils", called={"resolve_obj_by_qualname": "qualname"}),
    _used("vllm.lora.layers", read="LogitsProcessorWithLoRA VocabParallelEmbeddingWithLoRA"),
    _used("vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA", read="base_layer"),
    _used("vllm.lora.model_manager", read="LRUCacheLoRAModelManager"),
    _used("vllm.lora.peft_helper", read="PEFTHelper"),
    _used("vllm.config.lora:LoRAConfig", read="max_cpu_loras"),
    _used("vllm.lora.layers.replicated_linear:ReplicatedLinearWithLoRA", read="input_size output_size"),
    _used(
        "vllm.lora.model_manager:LoRAModelManager",
        read="capacity is_pooling_model lora_index_to_id model modules packed_modules punica_wrapper_mapping",
    ),
    _used(
        "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager",
        read="_adapter_manager _manager_cls",
        called={"create_lora_manager": "model, vllm_config"},
        overridden={"_load_adapter": "lora_request"},
    ),
    _used(
        "vllm.lora.lora_model:LoRAModel",
        read="loras modules_to_save",
        overridden={"from_lora_tensors": "lora_model_id, tensors, peft_helper, **others"},
    ),
    _used("vllm.lora.lora_weights:LoRALayerWeights", read="lora_a lora_b rank scaling"),
    _used("vllm.lora.lora_weights:LoRAFullModuleWeights", read="bias weight"),
    _used(
        "vllm.lora.utils",
        called={
            "get_adapter_absolute_path": "lora_path",
            "parse_fine_tuned_lora_name": "name, weights_mapper",
        },
    ),
    _used("vllm.model_executor.models", called={"supports_lora": "model"}),
    _used(
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU",
        "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU",
        read="device sampler_indices token_lora_indices",
        overridden={
            "add_lora_logits": "y, x, lora_a_stacked, lora_b_stacked, scale, **others",
            "update_metadata": "mapping, lora_index_to_id, max_loras, vocab_size, **others",
            "add_lora_linear": "y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **others",
        },
    ),
)

_MODEL: Final = (
    _used(
        "vllm.distributed",
        called={"get_pp_group": "", "get_tp_group": "", "tensor_model_parallel_all_gather": "input_"},
    ),
    _used(
        "vllm.distributed.parallel_state:GroupCoordinator",
        read="cpu_group device rank_in_group ranks world_size",
        called={"all_gather": "input_, *, dim", "broadcast": "input_", "broadcast_object": "obj=None"},
    ),
    _used(
        "vllm.model_executor.models.gemma3n:Gemma3nTextModel",
        read="config embed_tokens",
        called={"get_per_layer_input_embeddings": "input_ids"},
    ),
    _used(
        "vllm.model_executor.models.gemma3n:Gemma3nForCausalLM",
        overridden={"forward": "input_ids, positions, **others"},
    ),
    _used("vllm.model_executor.layers.activation", read="GeluAndMul SiluAndMul"),
    _used("vllm.model_executor.layers.layernorm", read="GemmaRMSNorm RMSNorm"),
    _used(
        "vllm.model_executor.layers.linear",
        read="ColumnParallelLinear LinearBase MergedColumnParallelLinear QKVParallelLinear ReplicatedLinear "
        "RowParallelLinear UnquantizedLinearMethod",
    ),
    _used(
        "vllm.model_executor.layers.linear:LinearBase",
        read="input_size output_size quant_method requires_unquantized_input tp_size",
    ),
    _used(
        "vllm.model_executor.layers.linear:ColumnParallelLinear",
        read="gather_output output_size_per_partition tp_size",
    ),
    _used("vllm.model_executor.layers.linear:MergedColumnParallelLinear", read="output_sizes"),
    _used(
        "vllm.model_executor.layers.linear:QKVParallelLinear",
        read="head_size num_heads num_kv_head_replicas num_kv_heads total_num_kv_heads v_head_size",
    ),
    _used(
        "vllm.model_executor.layers.linear:RowParallelLinear",
        read="input_is_parallel input_size_per_partition reduce_results",
    ),
    _used(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        read="UnquantizedEmbeddingMethod VocabParallelEmbedding",
    ),
    _used(
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding",
        read="num_embeddings_per_partition org_vocab_size quant_method tp_size",
    ),
    _used(
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
        called={"apply": "layer, x, *, bias"},
    ),
    _used(
        "vllm.model_executor.layers.attention:Attention",
        read="has_sink head_size head_size_v impl num_heads num_kv_heads sliding_window use_alibi_sqrt",
        called={"forward": "query, key, value"},
    ),
    _used(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl",
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl",
        "vllm.v1.attention.backends.flashinfer:FlashInferImpl",
        "vllm.v1.attention.backends.flex_attention:FlexAttentionImpl",
        "vllm.v1.attention.backends.rocm_attn:RocmAttentionImpl",
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl",
        read="alibi_slopes logits_soft_cap scale",
    ),
    _used("vllm.model_executor.layers.attention_layer_base", read="AttentionLayerBase"),
    _used("vllm.model_executor.layers.logits_processor", read="LogitsProcessor"),
    _used("vllm.model_executor.layers.mamba.mamba_mixer2", read="Mixer2RMSNormGated"),
    _used("vllm.model_executor.layers.minimax_rms_norm.rms_norm_tp", read="MiniMaxText01RMSNormTP"),
    _used("vllm.model_executor.layers.fused_moe.runner.moe_runner", read="MoERunner"),
    _used("vllm.model_executor.layers.fused_moe.runner.shared_experts", read="SharedExperts"),
    _used(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner",
        read="is_monolithic moe_config routed_scaling_factor router shared_experts",
        called={"_maybe_apply_routed_scale_to_output": "shared_output, fused_output"},
    ),
    _used(
        "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig",
        read="dp_size in_dtype is_sequence_parallel num_logical_experts pcp_size skip_final_all_reduce",
    ),
    _used("vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter", read="top_k"),
    _used(
        "vllm.model_executor.layers.fused_moe.router.fused_moe_router:FusedMoERouter",
        read="eplb_state",
        called={"select_experts": "hidden_states, router_logits"},
    ),
    _used(
        "vllm.model_executor.layers.fused_moe.router.cpu_router:CPURouter",
        read="custom_routing_function e_score_correction_bias renormalize routed_scaling_factor scoring_func "
        "top_k use_grouped_topk",
        overridden={"_compute_routing": "hidden_states, router_logits, indices_type, **others"},
    ),
    _used(
        "vllm.model_executor.layers.fused_moe.router.cpu_router",
        called={
            "_grouped_topk": "gating_output, topk, renormalize, num_expert_group, topk_group, scoring_func, "
            "routed_scaling_factor, e_score_correction_bias",
        },
    ),
    _used(
        "vllm.model_executor.models.phimoe:PhiMoEForCausalLM",
        read="lm_head logits_processor",
        overridden={"compute_logits": "hidden_states"},
    ),
    _used(
        "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2",
        read="head_dim kv_cache num_heads prefix ssm_state_size use_replayssm",
    ),
    _used(
        "vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadata",
        read="num_decodes num_prefills state_indices_tensor_d state_indices_tensor_p",
    ),
    _used("vllm.model_executor.models.utils", read="PPMissingLayer"),
    _used("vllm.tokenizers", called={"cached_tokenizer_from_config": "model_config"}),
)

_SCHEDULER: Final = (
    _used(
        "vllm.v1.core.sched.scheduler:Scheduler",
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
        read="block_size finished_req_ids kv_cache_config kv_cache_manager max_num_active_reqs "
        "max_num_running_reqs max_num_scheduled_tokens need_mamba_block_aligned_split needs_kv_cache_zeroing "
        "num_spec_tokens pause_state requests running scheduler_config vllm_config waiting",
        called={"_preempt_request": "request, timestamp"},
        overridden={
            "__init__": "vllm_config, kv_cache_config, structured_output_manager, block_size, **others",
            "add_request": "request",
            "schedule": "**others",
            "update_from_output": "scheduler_output, model_runner_output",
            "finish_requests": "request_ids, finished_status",
            "_get_new_block_ids_to_zero": "",
            "_preempt_request": "request, timestamp, **others",
            "_try_schedule_encoder_inputs": "request, num_computed_tokens, num_new_tokens, "
            "encoder_compute_budget, shift_computed_tokens=0",
            "_reserve_prefill_lookahead": "request, num_computed_tokens, num_new_tokens",
            "_update_after_schedule": "scheduler_output",
            "update_draft_token_ids": "draft_token_ids",
            "_update_request_with_output": "request, new_token_ids, **others",
        },
    ),
    _used(
        "vllm.v1.core.sched.output:SchedulerOutput",
        read="finished_req_ids num_scheduled_tokens scheduled_cached_reqs "
        "scheduled_encoder_inputs scheduled_new_reqs scheduled_spec_decode_tokens total_num_scheduled_tokens",
    ),
    _used(
        "vllm.v1.core.sched.output:NewRequestData",
        read="block_ids lora_request prefill_token_ids prompt_embeds prompt_token_ids req_id sampling_params",
    ),
    _used(
        "vllm.v1.core.sched.output:CachedRequestData",
        read="all_token_ids new_block_ids num_output_tokens req_ids resumed_req_ids",
    ),
    _used(
        "vllm.v1.core.sched.request_queue:RequestQueue",
        called={"add_request": "request", "remove_requests": "requests"},
    ),
    _used(
        "vllm.v1.request:Request",
        read="all_token_ids client_index has_encoder_inputs is_prefill_chunk mm_features num_computed_tokens "
        "num_in_flight_tokens num_output_placeholders num_prompt_tokens num_tokens num_tokens_with_spec "
        "pooling_params prompt_embeds request_id sampling_params spec_token_ids status",
        called={"get_finished_reason": ""},
    ),
    _used(
        "vllm.v1.request:RequestStatus",
        read="FINISHED_ERROR FINISHED_STOPPED PREEMPTED RUNNING WAITING",
    ),
    _used(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        read="block_pool coordinator",
        called={"evict_blocks": "block_ids", "get_block_ids": "request_id", "take_new_block_ids": ""},
    ),
    _used("vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator", read="single_type_managers"),
    _used(
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager",
        read="_record_new_block_ids kv_cache_spec",
    ),
    _used("vllm.v1.core.block_pool:BlockPool", read="blocks", called={"get_num_free_blocks": ""}),
    _used("vllm.v1.core.kv_cache_utils:KVCacheBlock", read="block_hash"),
    _used("vllm.v1.kv_cache_interface", read="CircularBufferSpec MambaSpec"),
    _used(
        "vllm.v1.kv_cache_interface:KVCacheConfig", read="kv_cache_groups needs_kv_cache_zeroing num_blocks"
    ),
    _used("vllm.v1.kv_cache_interface:KVCacheGroupSpec", read="layer_names"),
    _used("vllm.v1.engine", read="EngineCoreOutput EngineCoreOutputs PauseMode"),
    _used(
        "vllm.v1.engine:EngineCoreOutput",
        read="finish_reason finished kv_transfer_params new_token_ids request_id",
    ),
    _used("vllm.v1.engine:EngineCoreOutputs", read="outputs"),
)

_CONFIG: Final = (
    _used(
        "vllm.config",
        read="CUDAGraphMode CompilationConfig ModelConfig VllmConfig",
        called={"set_current_vllm_config": "vllm_config"},
    ),
    _used(
        "vllm.config:VllmConfig",
        read="additional_config cache_config compilation_config diffusion_config ec_transfer_config "
        "kv_transfer_config lora_config model_config parallel_config scheduler_config speculative_config "
        "structured_outputs_config watermark_config",
    ),
    _used(
        "vllm.config:ParallelConfig",
        read="data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb data_parallel_size "
        "data_parallel_size_local decode_context_parallel_size enable_batch_sharded_sampling "
        "pipeline_parallel_size placement_group "
        "prefill_context_parallel_size tensor_parallel_size use_ray use_ubatching world_size",
    ),
    _used(
        "vllm.config:SchedulerConfig", read="async_scheduling enable_chunked_prefill max_num_batched_tokens"
    ),
    _used(
        "vllm.config:SpeculativeConfig",
        read="enable_adaptive_verification max_num_new_slots_for_drafting method rejection_sample_method",
        called={"use_multi_module_mtp": ""},
    ),
    _used(
        "vllm.config:ModelConfig",
        read="architectures dtype enable_sleep_mode has_inner_state hf_config hf_text_config is_diffusion "
        "is_mm_prefix_lm is_moe is_multimodal_model max_model_len multimodal_config pooler_config "
        "runner_type served_model_name tokenizer tokenizer_mode tokenizer_revision trust_remote_code "
        "use_fp64_gumbel uses_mrope",
        called={
            "get_hidden_size": "",
            "get_pooling_task": "supported_tasks",
            "get_total_num_hidden_layers": "",
            "get_vocab_size": "",
        },
    ),
    _used("vllm.config:CacheConfig", read="enable_prefix_caching kv_sharing_fast_prefill"),
    _used("vllm.config:PoolerConfig", read="task"),
    _used(
        "vllm.config:CompilationConfig",
        read="compile_mm_encoder cudagraph_capture_sizes cudagraph_mode splitting_ops static_forward_context",
        called={"is_attention_compiled_piecewise": ""},
    ),
    _used(
        "vllm.config:CUDAGraphMode",
        read="FULL FULL_DECODE_ONLY NONE PIECEWISE",
        called={"decode_mode": "", "has_piecewise_cudagraphs": ""},
    ),
    _used("vllm.config.structured_outputs:StructuredOutputsConfig", read="backend reasoning_parser"),
    _used("vllm.triton_utils", read="dispatcher"),
    _used("vllm.platforms", read="current_platform", called={"cpu_platform_plugin": ""}),
    _used(
        "vllm.platforms.interface:Platform",
        read="device_type ray_device_key",
        called={"is_cpu": "", "is_sleep_mode_available": ""},
    ),
    _used(
        "vllm.platforms.cpu:CpuPlatform",
        read="ray_device_key",
        overridden={"check_and_update_config": "vllm_config", "register_triton_kernel_overrides": ""},
    ),
    _used(
        "vllm.engine.arg_utils:AsyncEngineArgs",
        read="additional_config async_scheduling disable_log_stats distributed_executor_backend "
        "enable_log_requests scheduler_cls worker_cls",
        called={"create_engine_config": "usage_context=None", "from_cli_args": "args"},
    ),
    _used(
        "vllm.engine.arg_utils:EngineArgs",
        read="enable_prefix_caching",
        called={"create_engine_config": "usage_context=None"},
    ),
    _used("vllm.v1.executor", read="Executor"),
    _used("vllm.v1.executor:Executor", called={"get_class": "vllm_config"}),
    _used(
        "vllm.v1.executor.ray_executor_v2:RayExecutorV2",
        read="parallel_config shutting_down",
        overridden={"_init_executor": "", "_build_runtime_env": "", "shutdown": ""},
    ),
    _used("vllm.v1.executor.ray_utils", read="ray", called={"assert_ray_available": ""}),
)

_CLIENT: Final = (
    _used("vllm.v1.metrics.loggers:StatLoggerManager", called={"record_sleep_state": "sleep=0, level=0"}),
    _used(
        "vllm.v1.engine.async_llm:AsyncLLM",
        read="engine_core errored input_processor logger_manager model_config output_handler "
        "output_processor renderer vllm_config",
        called={
            "abort": "request_id",
            "from_engine_args": "engine_args",
            "encode": "prompt, pooling_params, request_id",
            "generate": "prompt, sampling_params, request_id, *, data_parallel_rank, lora_request=None",
            "get_num_unfinished_requests": "",
            "get_supported_tasks": "",
            "get_tokenizer": "",
            "is_sleeping": "",
            "shutdown": "",
            "_run_output_handler": "",
        },
        overridden={
            "__init__": "vllm_config, executor_class, log_stats, *, usage_context=None, log_requests=True, "
            "**others",
            "add_lora": "lora_request",
            "add_request": "request_id, prompt, params, *, trace_headers=None, **others",
            "collective_rpc": "method, timeout=None, args=(), kwargs=None",
            "encode": "prompt, pooling_params, request_id, **others",
            "generate": "prompt, sampling_params, request_id, **others",
            "sleep": "level=1, mode='abort'",
            "wake_up": "tags=None",
            "pause_generation": "*, mode='abort', clear_cache=True",
            "resume_generation": "",
        },
    ),
    _used("vllm.v1.engine.exceptions", read="EngineDeadError EngineGenerateError"),
    _used("vllm.v1.engine.input_processor:InputProcessor", read="structured_outputs_config"),
    _used(
        "vllm.v1.engine.output_processor:OutputProcessor",
        read="request_states",
        called={
            "add_request": "request, prompt, parent_req=None, request_index=0",
            "process_outputs": "engine_core_outputs",
        },
    ),
    _used(
        "vllm.v1.engine.output_processor:RequestState",
        read="detokenizer parent_req prompt_len request_id request_index",
    ),
    _used("vllm.v1.engine.parallel_sampling:ParentRequest", read="request_id"),
    _used("vllm.v1.engine.detokenizer:IncrementalDetokenizer", called={"num_output_tokens": ""}),
    _used("vllm.v1.engine.core:EngineCore", called={"collective_rpc": "method, timeout, args, kwargs"}),
    _used("vllm.v1.engine.core_client:MPClient", read="core_engines resources", called={"shutdown": ""}),
    _used(
        "vllm.v1.engine.core_client:AsyncMPClient",
        called={
            "call_utility_all_async": "method, called, timeout, args, kwargs",
            "_call_utility_async": "method, called, timeout, args, kwargs, *, engine",
        },
    ),
    _used("vllm.v1.engine.core_client:DPLBAsyncMPClient", read="engine_inflight"),
    _used("vllm.v1.engine.core_client:BackgroundResources", read="engine_manager"),
    _used("vllm.v1.engine.utils:CoreEngineProcManager", read="processes"),
    _used(
        "vllm.entrypoints.llm:LLM",
        read="llm_engine",
        called={
            "collective_rpc": "method, *, args",
            "enqueue": "prompts, sampling_params, *, lora_request, use_tqdm",
            "get_tokenizer": "",
            "wait_for_completion": "output_type, *, use_tqdm",
        },
    ),
    _used(
        "vllm.v1.engine.llm_engine:LLMEngine",
        read="engine_core output_processor renderer",
        called={"abort_request": "request_ids, *, internal"},
    ),
    _used(
        "vllm.exceptions",
        read="GracefulHTTPError VLLMClientError VLLMUnprocessableEntityError VLLMValidationError",
    ),
    _used("vllm.outputs", read="PoolingRequestOutput RequestOutput"),
    _used("vllm.outputs:RequestOutput", read="finished outputs"),
    _used("vllm.model_executor.models.adapters", read="as_embedding_model as_seq_cls_model"),
    _used("vllm.lora.request", read="LoRARequest"),
    _used("vllm.model_executor.models.interfaces:SupportsLoRA", read="embedding_modules"),
    _used("vllm.lora.utils", called={"get_adapter_absolute_path": "lora_path"}),
    _used("vllm.lora.request:LoRARequest", read="lora_int_id lora_name lora_path"),
    _used("vllm.pooling_params", read="PoolingParams"),
    _used("vllm.tasks", read="SupportedTask"),
    _used(
        "vllm.pooling_params:PoolingParams",
        read="extra_kwargs task",
        called={"clone": "", "verify": "model_config"},
    ),
    _used("vllm.sampling_params", read="RequestOutputKind SamplingParams StructuredOutputsParams"),
    _used(
        "vllm.sampling_params:SamplingParams",
        read="eos_token_id extra_args max_tokens n output_kind prompt_logprobs repetition_detection "
        "skip_reading_prefix_cache stop stop_token_ids structured_outputs",
        called={
            "clone": "",
            "_validate_structured_outputs": "model_config, structured_outputs_config, tokenizer",
        },
    ),
    _used(
        "vllm.sampling_params:StructuredOutputsParams",
        read="_backend _backend_was_auto choice grammar",
        called={"all_constraints_none": ""},
    ),
    _used("vllm.usage.usage_lib", read="UsageContext"),
    _used("vllm.tokenizers", called={"get_tokenizer": "tokenizer_name"}),
    _used("vllm.v1.structured_output.request", called={"get_structured_output_key": "params"}),
    _used(
        "vllm.v1.structured_output.backend_guidance:GuidanceBackend",
        "vllm.v1.structured_output.backend_lm_format_enforcer:LMFormatEnforcerBackend",
        "vllm.v1.structured_output.backend_outlines:OutlinesBackend",
        "vllm.v1.structured_output.backend_xgrammar:XgrammarBackend",
        read="tokenizer vllm_config vocab_size",
        called={"allocate_token_bitmask": "max_num_seqs", "compile_grammar": "request_type, grammar_spec"},
    ),
    _used(
        "vllm.v1.structured_output.backend_types:StructuredOutputGrammar",
        called={"fill_bitmask": "bitmask, batch_index"},
    ),
)

_SERVER: Final = (
    _used(
        "vllm.entrypoints.launchers.api_server.app_state",
        called={"init_app_state": "engine_client, state, args, supported_tasks"},
    ),
    _used(
        "vllm.entrypoints.cli.serve",
        called={"make_arg_parser": "parser", "validate_parsed_serve_args": "args"},
    ),
    _used("vllm.entrypoints.launchers.launcher", called={"validate_api_server_args": "args"}),
    _used("vllm.entrypoints.serve.engine.protocol", read="ErrorInfo ErrorResponse ModelList"),
    _used("vllm.entrypoints.serve.tokenize.protocol", read="DetokenizeRequest"),
    _used("vllm.renderers.chat_utils", read="ChatTemplateContentFormatOption"),
    _used("vllm.renderers.params", read="ChatParams TokenizeParams"),
    _used("vllm.multimodal.media", read="MEDIA_CONNECTOR_REGISTRY MediaConnector"),
    _used(
        "vllm.multimodal.media.connector:MediaConnector",
        read="allowed_local_media_path allowed_media_domains "
        "fetch_image fetch_audio fetch_video "
        "fetch_image_embedding fetch_audio_embedding fetch_video_embedding "
        "fetch_image_async fetch_audio_async fetch_video_async fetch_image_embedding_async "
        "fetch_audio_embedding_async fetch_video_embedding_async",
        overridden={
            "load_from_url": "url, media_io, **others",
            "load_from_url_async": "url, media_io, **others",
        },
    ),
    _used("vllm.config.multimodal:MultiModalConfig", read="mm_encoder_tp_mode"),
    _used("vllm.multimodal.inputs:MultiModalFeatureSpec", read="data identifier mm_hash modality"),
    _used(
        "vllm.multimodal.cache:LruKeyReplicatedSenderCache",
        read="_cache is_cached_item",
        called={"get_and_update_item": "mm_item, mm_hash"},
    ),
    _used("vllm.renderers.base:BaseRenderer", read="mm_processor_cache"),
    _used("vllm.utils.cache:LRUCache", called={"__getitem__": "key, *, update_info", "pop": "key, default"}),
    _used("vllm.multimodal.inputs:PlaceholderRange", called={"extract_embeds_range": ""}, read="offset"),
    _used("vllm.utils.argparse_utils", read="FlexibleArgumentParser"),
    _used(
        "vllm.utils.argparse_utils:FlexibleArgumentParser",
        called={"load_config_file": "file_path"},
        overridden={"error": "message"},
    ),
    _used("vllm.reasoning", read="ReasoningParser"),
    _used(
        "vllm.reasoning:ReasoningParserManager",
        called={"get_reasoning_parser": "name", "import_reasoning_parser": "plugin_path"},
    ),
    _used(
        "vllm.reasoning:ReasoningParser",
        read="reasoning_end_str reasoning_start_str",
        called={"extract_reasoning": "model_output, request"},
    ),
    _used("vllm.tool_parsers:ToolParserManager", called={"import_tool_parser": "plugin_path"}),
    _used("vllm.entrypoints.generate.api_router", called={"register_generate_api_routers": "app"}),
    _used(
        "vllm.entrypoints.pooling.factories",
        called={"register_pooling_api_routers": "app, supported_tasks, model_config"},
    ),
    _used("vllm.entrypoints.openai.responses.protocol", read="ResponsesRequest ResponsesResponse"),
    _used("vllm.entrypoints.openai.models.serving", read="OpenAIServingModels"),
    _used(
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels",
        read="engine_client lora_id_counter lora_requests lora_resolver_lock",
        called={"is_base_model": "model_name"},
        overridden={
            "load_lora_adapter": "request, base_model_name=None",
            "unload_lora_adapter": "request",
            "show_available_models": "",
        },
    ),
    _used("vllm.entrypoints.serve.lora.api_router", called={"attach_router": "app"}),
    _used("vllm.entrypoints.serve.lora.protocol", read="LoadLoRAAdapterRequest UnloadLoRAAdapterRequest"),
    _used("vllm.entrypoints.serve.dev.cache.api_router", read="router"),
    _used("vllm.entrypoints.serve.dev.server_info.api_router", read="router"),
    _used("vllm.entrypoints.serve.dev.sleep.api_router", read="router"),
    _used("vllm.entrypoints.rl.online.api_router", read="router"),
    _used(
        "vllm.entrypoints.anthropic.serving:AnthropicServingMessages",
        called={
            "create_messages": "request, raw_request",
            "create_streaming_error_response": "message",
            "message_stream_converter": "generator",
            "messages_full_converter": "generator",
        },
    ),
    _used(
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses",
        read="background_tasks response_store",
        called={
            "_make_response_output_items": "request, final_output, tokenizer, *, parser",
            "responses_stream_generator": "request, sampling_params, result_generator, context, model_name, "
            "tokenizer, request_metadata, created_time",
        },
    ),
    _used("vllm.entrypoints.generate.base.protocol", read="FunctionCall"),
    _used("vllm.parser.abstract_parser", read="DelegatingParser Parser"),
    _used(
        "vllm.parser.abstract_parser:Parser",
        read="model_tokenizer tool_parser",
        called={"parse": "model_output, request, enable_auto_tools, model_output_token_ids"},
    ),
    _used(
        "vllm.parser.abstract_parser:DelegatingParser",
        read="model_tokenizer",
        called={
            "_extract_tool_calls_streaming": "previous_text, current_text, delta_text, previous_token_ids, "
            "current_token_ids, delta_token_ids, request",
            "extract_reasoning": "model_output, request",
        },
    ),
    _used(
        "vllm.tool_parsers.abstract_tool_parser:ToolParser",
        read="engine_based_streaming supports_required_and_named",
    ),
    _used("vllm.tool_parsers.utils", called={"partial_tag_overlap": "text, tag"}),
    _used("vllm.entrypoints.serve.instrumentator.basic", read="router"),
    _used("vllm.entrypoints.serve.tokenize.api_router", called={"attach_router": "app"}),
    _used("vllm.entrypoints.serve.exception_handling.register", called={"init_exception_handler": "app"}),
    _used(
        "vllm.entrypoints.serve.exception_handling.error_response",
        called={"create_error_response": "message"},
    ),
    _used(
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
        "vllm.entrypoints.openai.completion.protocol:CompletionRequest",
        called={"extract_structured_outputs": ""},
        overridden={"to_sampling_params": "max_tokens, default_sampling_params, **others"},
    ),
    _used(
        "vllm.entrypoints.serve.tokenize.protocol:TokenizeChatRequest",
        overridden={
            "build_chat_params": "default_template, default_template_content_format",
            "build_tok_params": "model_config",
        },
    ),
    _used(
        "vllm.entrypoints.serve.tokenize.protocol:TokenizeCompletionRequest",
        overridden={"build_tok_params": "model_config"},
    ),
    _used(
        "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat",
        called={
            "chat_completion_full_generator": "request, result_generator, request_id, model_name, "
            "conversation, tokenizer, request_metadata, *, parser, mm_token_counts",
            "create_chat_completion": "request, raw_request",
            "create_streaming_error_response": "message",
        },
    ),
    _used(
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion",
        called={"create_completion": "request, raw_request", "create_streaming_error_response": "message"},
    ),
    _used(
        "vllm.entrypoints.serve.tokenize.serving:ServingTokenization",
        called={"create_detokenize": "request, raw_request", "create_tokenize": "request, raw_request"},
    ),
)

USED_NAMES: Final = (*_WORKER, *_MODEL, *_SCHEDULER, *_CONFIG, *_CLIENT, *_SERVER)
