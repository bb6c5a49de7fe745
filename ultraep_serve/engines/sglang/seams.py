"""Where this adapter touches SGLang; imports nothing of it.

Every name that the adapter imports is here (a test compares), every target of a hook, and every
attribute that it reads.
"""

from ultraep_serve.engines.common.seams import Seam

__all__ = ["HOOKED", "SEAMS"]

_SRT = "sglang.srt"
_MOE = f"{_SRT}.layers.moe"
_LAYER = f"{_MOE}.fused_moe_triton.layer"

# Targets of hooks, by what the adapter does there.
HOOKED = {
    "load": Seam(
        f"{_SRT}.model_executor.model_runner:ModelRunner.load_model",
        "a model is loaded: its layers are taken over",
        parameters="self",
    ),
    "forward": Seam(
        f"{_SRT}.model_executor.model_runner:ModelRunner.forward",
        "a batch runs: whether it is prefill, and how large",
        parameters="self forward_batch skip_attn_backend_init pp_proxy_tensors reinit_attn_backend "
        "split_forward_count",
    ),
    "experts": Seam(
        f"{_LAYER}:FusedMoE.forward_impl",
        "between routing and dispatch: here a layer is balanced",
        parameters="self hidden_states topk_output pre_quant_input",
    ),
    "core": Seam(
        f"{_LAYER}:FusedMoE.run_moe_core",
        "the launch of experts, which is timed",
        parameters="self dispatch_output",
    ),
    "compute": Seam(
        f"{_MOE}.fused_moe_native:moe_forward_native",
        "experts on CPU",
        parameters="layer x topk_output moe_runner_config",
    ),
    "scheduler": Seam(
        f"{_SRT}.managers.scheduler:Scheduler.__init__",
        "its end comes before the first request",
    ),
    "gather": Seam(
        f"{_SRT}.managers.scheduler_components.dp_attn:MLPSyncBatchInfo.all_gather",
        "tokens of all ranks with attention data parallelism",
        parameters="self device group use_all_reduce",
    ),
}
_SWITCHING_ON = (
    Seam(
        f"{_SRT}.plugins:GENERAL_PLUGINS_GROUP",
        "the entry points that every process of SGLang calls",
        mentions="sglang.srt.plugins",
    ),
    Seam(
        f"{_SRT}.plugins.hook_registry:HookRegistry.register",
        "how hooks are registered",
        passed="target hook hook_type",
    ),
    Seam(f"{_SRT}.plugins.hook_registry:HookType", "kinds of hooks", attributes="AFTER AROUND"),
    Seam(
        f"{_SRT}.plugins.hook_registry",
        "its wrappers close over the hook, by which one is found in place",
        mentions="hook wraps",
    ),
    Seam(f"{_SRT}.utils:is_cpu", "CPU or NVIDIA GPU"),
    Seam(f"{_SRT}.utils:is_cuda", "CPU or NVIDIA GPU"),
    Seam(
        f"{_SRT}.environ:Envs",
        "variables that the adapter reads",
        attributes="SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK SGLANG_PLUGINS "
        "SGLANG_SCHEDULER_SKIP_ALL_GATHER",
    ),
    Seam(f"{_SRT}.environ:envs", "variables that the adapter reads"),
)
_SETTINGS = (
    Seam(
        f"{_SRT}.arg_groups.overrides:resolving_view",
        "settings as SGLang has resolved them",
        passed="server_args",
    ),
    Seam(
        f"{_SRT}.arg_groups.field_order:POSITIONAL_FIELD_ORDER",
        "settings that must be as balancing needs them, and flags that the launcher reads or sets",
        mentions="attention_backend attn_cp_size attn_dp_size chunked_prefill_size context_length "
        "cpu_offload_gb cuda_graph_backend_prefill cuda_graph_config device "
        "disable_cuda_graph disable_prefill_cuda_graph disable_shared_experts_fusion "
        "dist_init_addr dp_size dwdp_size elastic_ep_backend enable_elastic_expert_backup "
        "enable_eplb enable_layernorm_sp enable_lora enable_memory_saver "
        "enable_nvidia_megakernel enable_paged_experts enable_pdmux "
        "enable_single_batch_overlap enable_torch_compile enable_trace enable_two_batch_overlap "
        "enable_waterfill enforce_shared_experts_fusion ep_dispatch_algorithm "
        "ep_num_redundant_experts ep_size expert_distribution_recorder_mode host "
        "init_expert_location kt_weight_path max_prefill_tokens max_total_tokens "
        "moe_a2a_backend moe_dp_size nnodes offload_group_size otlp_traces_endpoint port pp_size "
        "ssl_certfile startup_weight_load_mode tp_size weight_cache_mode",
    ),
    Seam(
        f"{_SRT}.arg_groups.fields.parallel:Parallel",
        "ranks and the groups that they form",
        attributes="attn_dp_size moe_ep_group tp_rank",
    ),
    *(
        Seam(f"{_SRT}.runtime_context:{name}", "settings and groups of this process")
        for name in ("get_observability", "get_parallel", "get_schedule", "get_server_args")
    ),
    Seam(
        f"{_SRT}.distributed.parallel_state:GroupCoordinator",
        "the ranks of a group",
        attributes="all_reduce cpu_group device_group rank_in_group",
    ),
    Seam(
        f"{_SRT}.model_executor.cuda_graph_config:CudaGraphConfig",
        "which batches are replayed",
        attributes="decode prefill",
    ),
    Seam(
        f"{_SRT}.model_executor.cuda_graph_config:PhaseConfig",
        "which batches are replayed",
        attributes="backend",
    ),
    Seam(
        f"{_SRT}.utils.network:NetworkAddress",
        "the first host's address",
        attributes="host parse",
    ),
)
_LAYERS = (
    Seam(
        f"{_LAYER}:FusedMoE",
        "the layers that are balanced",
        attributes="dispatcher forward forward_impl hidden_size is_draft layer_id layer_name "
        "moe_ep_rank moe_ep_size moe_runner_config named_per_expert_tensors num_experts "
        "num_fused_shared_experts num_local_experts params_dtype quant_method reduce_results "
        "run_moe_core runner_backend scheme top_k",
        mentions="forward_impl run_moe_core",
    ),
    Seam(
        f"{_MOE}.ep_moe.layer:DeepEPMoE",
        "layers with DeepEP",
        attributes="deprecate_flag forward forward_impl run_moe_core",
    ),
    Seam(
        f"{_MOE}.moe_runner.base:MoeRunnerConfig",
        "sizes of a layer; those of experts are set anew for slots",
        attributes="activation apply_router_weight_on_input gemm1_alpha gemm1_clamp_limit is_gated "
        "num_experts num_local_experts",
    ),
    Seam(
        f"{_LAYER}:create_moe_dispatcher",
        "dispatch and combine, made anew with slots",
        passed="moe_runner_config quant_method",
    ),
    Seam(
        f"{_MOE}.token_dispatcher.base:BaseDispatcher",
        "dispatch and combine",
        attributes="quant_config set_quant_config",
    ),
    Seam(f"{_MOE}.token_dispatcher.standard:StandardDispatcher", "all ranks have all tokens"),
    Seam(f"{_MOE}.token_dispatcher.deepep:DeepEPDispatcher", "each rank has its own tokens"),
    Seam(
        f"{_SRT}.batch_overlap.two_batch_overlap:MaybeTboDeepEPDispatcher",
        "wraps DeepEP's dispatchers",
        attributes="_inners",
    ),
    Seam(
        f"{_SRT}.layers.quantization.unquant:UnquantizedFusedMoEMethod",
        "experts that are not quantised",
        mentions="_cutlass_swiglu_params use_intel_amx_backend w13_weight w2_weight",
    ),
    Seam(
        f"{_MOE}.utils:filter_moe_weight_param_global_expert",
        "which tensors make an expert",
        passed="name x num_local_experts",
    ),
    Seam(
        f"{_MOE}.moe_runner.flashinfer_cutlass:materialize_swiglu_params_for_cutlass",
        "a kernel's parameters of the activation, made anew with slots",
        passed="runner_config num_local_experts device",
    ),
    Seam(
        f"{_MOE}.utils:should_use_flashinfer_cutlass_moe_fp4_allgather",
        "a dispatch that is refused",
    ),
    Seam(
        f"{_MOE}.utils:DeepEPMode",
        "how many tokens are dispatched at once",
        attributes="is_low_latency resolve",
    ),
    Seam(f"{_MOE}.utils:MoeA2ABackend", "how tokens are dispatched", attributes="is_deepep"),
    Seam(f"{_MOE}.utils:get_deepep_mode", "how many tokens are dispatched at once"),
    Seam(f"{_MOE}.utils:get_moe_a2a_backend", "how tokens are dispatched"),
    Seam(
        f"{_SRT}.models.transformers:TransformersFusedMoE",
        "models of the Transformers backend, whose sum is completed",
        attributes="experts",
    ),
)
_RUNNING = (
    Seam(
        f"{_SRT}.model_executor.model_runner:ModelRunner",
        "the model of a rank",
        attributes="is_draft_worker model model_config server_args",
    ),
    Seam(
        f"{_SRT}.configs.model_config:ModelConfig",
        "the checkpoint",
        attributes="model_path quantization",
    ),
    Seam(f"{_SRT}.managers.scheduler:Scheduler", "its model", attributes="tp_worker"),
    Seam(f"{_SRT}.managers.tp_worker:TpModelWorker", "its model", attributes="model_runner"),
    Seam(
        f"{_SRT}.model_executor.forward_batch_info:ForwardMode",
        "prefill or decode",
        attributes="EXTEND MIXED",
    ),
    Seam(
        f"{_SRT}.model_executor.forward_batch_info:ForwardBatch",
        "the batch that runs",
        attributes="extend_num_tokens forward_mode is_extend_in_batch",
    ),
    Seam(
        f"{_SRT}.managers.scheduler_components.dp_attn:MLPSyncBatchInfo",
        "tokens of all ranks",
        attributes="global_num_tokens",
    ),
    Seam(
        f"{_MOE}.topk:StandardTopKOutput",
        "what the router chose",
        passed="topk_weights topk_ids router_logits",
    ),
    Seam(
        f"{_MOE}.topk:TopKOutputChecker",
        "what the router chose",
        attributes="format_is_standard",
    ),
    Seam(f"{_SRT}.layers.dp_attention:get_is_extend_in_batch", "the phase that DeepEP asks for"),
    Seam(
        f"{_SRT}.layers.dp_attention:set_is_extend_in_batch",
        "the phase that DeepEP asks for",
        passed="is_extend_in_batch",
    ),
)
_ON_CPU = (
    Seam(
        f"{_SRT}.layers.activation",
        "activations on CPU",
        attributes="GeluAndMul SiluAndMul SituAndMul",
    ),
    Seam(
        f"{_MOE}.moe_runner.triton_utils.fused_moe:swiglu_gpt_oss_sigmoid_alpha",
        "an activation on CPU",
        passed="x gemm1_alpha gemm1_limit",
    ),
    Seam(
        f"{_SRT}.eplb.expert_distribution",
        "calls what torch has not for CPUs, and is given",
        mentions="empty_cache get_device_module is_current_stream_capturing",
    ),
)
SEAMS = (*HOOKED.values(), *_SWITCHING_ON, *_SETTINGS, *_LAYERS, *_RUNNING, *_ON_CPU)
