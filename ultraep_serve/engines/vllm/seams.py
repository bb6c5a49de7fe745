"""Where this adapter touches vLLM; imports nothing of it.

Every name that the adapter imports is here (a test compares), and every attribute that it reads.
"""

from ultraep_serve.engines.common.seams import Seam

__all__ = ["SEAMS"]

_MOE = "vllm.model_executor.layers.fused_moe"
_KERNELS = f"{_MOE}.modular_kernel"
_WORKERS = "vllm.v1.worker"

_SWITCHING_ON = (
    Seam(
        "vllm.plugins:DEFAULT_PLUGINS_GROUP",
        "the entry points that every process of vLLM calls",
        mentions="vllm.general_plugins",
    ),
    Seam("vllm", "its version", attributes="__version__"),
    Seam(
        "vllm.config:VllmConfig",
        "settings of the engine and, of ours, additional_config",
        attributes="additional_config compilation_config instance_id kernel_config lora_config "
        "model_config observability_config parallel_config quant_config scheduler_config",
    ),
    Seam(
        "vllm.config:ParallelConfig",
        "ranks, hosts, pipeline stages and micro-batches",
        attributes="data_parallel_master_ip data_parallel_rank enable_elastic_ep "
        "enable_expert_parallel master_addr nnodes num_ubatches pipeline_parallel_size "
        "rank use_ubatching worker_cls",
    ),
    Seam(
        "vllm.config:ModelConfig",
        "names of the model, and whether weights may be taken out of memory",
        attributes="architectures enable_sleep_mode model",
    ),
    Seam(
        "vllm.config:CompilationConfig",
        "layers with experts, also of a draft model",
        attributes="static_all_moe_layers static_forward_context",
    ),
    Seam(
        "vllm.config:ObservabilityConfig",
        "where spans are sent",
        attributes="otlp_traces_endpoint",
    ),
    Seam("vllm.config:SchedulerConfig", "the largest batch", attributes="max_num_batched_tokens"),
    Seam("vllm.config:get_current_vllm_config", "the configuration of a model that is being built"),
    Seam(
        "vllm.config:KernelConfig",
        "whether one kernel routes and computes",
        attributes="moe_backend",
    ),
    Seam("vllm.config.kernel:MEGA_MOE_BACKENDS", "kernels that route, dispatch and compute"),
    Seam(
        "vllm.model_executor.layers.quantization.base_config:QuantizationConfig",
        "the format of quantised checkpoints",
        attributes="get_name",
    ),
    Seam("vllm.platforms:current_platform", "CPU or NVIDIA GPU"),
    Seam(
        "vllm.platforms.interface:Platform",
        "CPU or NVIDIA GPU",
        attributes="device_name device_type is_cpu is_cuda",
    ),
    Seam("vllm.logger:init_logger", "lines in vLLM's log", passed="name"),
    Seam("vllm.logger:_VllmLogger", "lines in vLLM's log", attributes="warning_once"),
)
_BUILDING = (
    Seam(
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding",
        "the layer that every model has: models without experts are refused there",
        attributes="update_param_tp_status",
    ),
    Seam(
        "vllm.model_executor.model_loader.utils:process_weights_after_loading",
        "calls the method by which layers are told that their weights are final",
        mentions="update_param_tp_status",
    ),
    Seam(
        f"{_MOE}.routed_experts:RoutedExperts",
        "the layers that are balanced",
        attributes="_expert_routing_tables activation apply_router_weight_on_input "
        "expert_map_manager expert_placement_strategy get_expert_weights global_num_experts "
        "hidden_size layer_name local_num_experts moe_config quant_method top_k "
        "update_expert_map use_ep",
    ),
    Seam(
        f"{_MOE}.routed_experts:RoutedExperts.forward_modular",
        "between routing and dispatch: here a layer is balanced",
        parameters="self x topk_weights topk_ids shared_experts shared_experts_input",
        mentions="apply",
    ),
    Seam(
        f"{_MOE}.runner.moe_runner:MoERunner",
        "holds the experts of a layer and their router, and calls them",
        attributes="routed_experts router",
        mentions="forward_modular",
    ),
    Seam(
        f"{_MOE}.router.zero_expert_router:ZeroExpertRouter",
        "models with experts that compute nothing",
    ),
    Seam(
        f"{_MOE}.runner.shared_experts:SharedExpertsOrder",
        "when shared experts are computed",
        attributes="MK_INTERNAL_OVERLAPPED",
    ),
    Seam(
        f"{_MOE}.expert_map_manager:ExpertMapManager",
        "which experts a rank has",
        attributes="num_fused_shared_experts",
    ),
)
_LAYERS = (
    Seam(
        f"{_MOE}.config:FusedMoEConfig",
        "sizes of a layer; those of experts are set anew for slots",
        attributes="dp_size ep_size in_dtype is_sequence_parallel max_num_tokens "
        "moe_parallel_config num_experts num_local_experts sp_size",
    ),
    Seam(
        f"{_MOE}.config:FusedMoEParallelConfig",
        "how a layer's ranks divide tokens and experts",
        attributes="all2all_backend dp_size enable_eplb ep_size is_sequence_parallel pcp_size "
        "tp_size use_all2all_kernels use_ep use_passthrough_all2all",
    ),
    Seam(
        f"{_MOE}.fused_moe_method_base:FusedMoEMethodBase",
        "the method that computes a layer; its kernel is made anew for slots",
        attributes="is_monolithic moe_kernel moe_quant_config topk_indices_dtype",
    ),
    Seam(
        f"{_MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.create_weights",
        "the tensors of experts that every format has",
        mentions="w13_weight w2_weight",
    ),
    Seam(
        f"{_MOE}.config:FusedMoEQuantConfig",
        "what a kernel reads beside weights",
        attributes="_a1 _a2 _w1 _w2 weight_quant_dtype w1_bias w2_bias",
    ),
    Seam(f"{_MOE}.config:FusedMoEQuantDesc", "scales of a kernel", attributes="dtype shape"),
    Seam(
        _KERNELS,
        "kinds of kernels",
        attributes="FusedMoEExperts FusedMoEExpertsModular FusedMoEKernel",
    ),
    Seam(
        f"{_KERNELS}:FusedMoEKernel",
        "dispatch, experts and combine of a layer, made anew with slots",
        passed="prepare_finalize fused_experts",
        attributes="fused_experts output_is_reduced prepare_finalize",
    ),
    Seam(
        f"{_KERNELS}:FusedMoEExperts",
        "an expert kernel, made anew from its own attributes",
        passed="moe_config quant_config",
        attributes="moe_config quant_config",
    ),
    Seam(
        f"{_KERNELS}:FusedMoEExpertsModular.apply",
        "the launch of experts, which is timed",
        passed="output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts "
        "expert_map a1q_scale a2_scale workspace13 workspace2 expert_tokens_meta "
        "apply_router_weight_on_input",
    ),
)
_ON_CPU = (
    Seam(
        f"{_MOE}.experts.cpu_moe:CPUUnquantizedExperts",
        "experts on CPU, given one row per assignment",
        attributes="_use_zentorch isa",
    ),
    Seam(
        f"{_MOE}.experts.cpu_moe:CPUUnquantizedExperts.apply",
        "the launch of experts on CPU",
        passed="output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts "
        "expert_map a1q_scale a2_scale workspace13 workspace2 expert_tokens_meta "
        "apply_router_weight_on_input",
    ),
    *(
        Seam(f"{_MOE}.experts.cpu_moe:{name}", "quantised experts on CPUs with AMX")
        for name in (
            *("CPUExpertsFp8", "CPUExpertsFp8W8A8", "CPUExpertsInt4", "CPUExpertsInt8"),
            "CPUExpertsMxfp4",
        )
    ),
    Seam(
        "vllm._custom_ops:cpu_prepack_moe_weight",
        "how matrices of experts are packed",
        passed="weight isa",
    ),
    Seam(
        f"{_MOE}.prepare_finalize.passthrough:PassThroughPrepareAndFinalize",
        "the stage for experts that dispatch and combine themselves",
    ),
    Seam(
        f"{_MOE}.activation:MoEActivation",
        "activations that are computed here",
        attributes="GELU GELU_TANH SILU",
    ),
)
_ON_GPU = (
    *(
        Seam(
            f"{_MOE}.prepare_finalize.{module}:{name}PrepareAndFinalize",
            "DeepEP's buffers, destroyed when they are made anew",
            attributes="buffer",
        )
        for module, name in (("deepep_ht", "DeepEPHT"), ("deepep_ll", "DeepEPLL"))
    ),
    Seam(
        f"{_MOE}.all2all_utils:maybe_make_prepare_finalize",
        "dispatch and combine, made anew with slots",
        passed="moe quant_config routing_tables allow_new_interface",
    ),
)
_RUNNING = (
    Seam(
        "vllm.distributed.parallel_state:GroupCoordinator",
        "the ranks of a group",
        attributes="all_gatherv all_reduce cpu_group device_communicator device_group "
        "rank_in_group ranks reduce_scatterv world_size",
    ),
    Seam(
        "vllm.distributed.device_communicators.base_device_communicator:DeviceCommunicatorBase",
        "whether vLLM gathers tokens of data-parallel ranks on CPU",
        attributes="all_gatherv reduce_scatterv",
    ),
    *(
        Seam(f"vllm.distributed:{name}", "the ranks of a group")
        for name in (
            "get_dp_group",
            "get_ep_group",
            "get_pp_group",
            "get_tp_group",
            "get_world_group",
        )
    ),
    Seam("vllm.distributed:get_tensor_model_parallel_rank", "which tokens a rank has"),
    Seam(
        "vllm.forward_context:ForwardContext",
        "the batch that runs",
        attributes="attn_metadata dp_metadata",
    ),
    Seam("vllm.forward_context:get_forward_context", "the batch that runs"),
    Seam(
        "vllm.forward_context:set_forward_context",
        "a batch that the self-check makes up",
        passed="attn_metadata vllm_config num_tokens num_tokens_across_dp",
    ),
    Seam(
        "vllm.forward_context:DPMetadata",
        "tokens of all ranks, known on the host",
        attributes="num_tokens_across_dp_cpu sp_local_sizes",
    ),
    Seam("vllm.v1.worker.ubatching:dbo_current_ubatch_id", "which of two micro-batches runs"),
    Seam(
        "vllm.utils.import_utils:resolve_obj_by_qualname",
        "the worker's class",
        passed="qualname",
    ),
    Seam(
        f"{_WORKERS}.gpu_worker:Worker.compile_or_warm_up_model",
        "the last that runs before requests",
        parameters="self",
    ),
    Seam(
        f"{_WORKERS}.cpu_worker:CPUWorker.compile_or_warm_up_model",
        "the last that runs before requests, on CPU",
        parameters="self",
    ),
)
_STARTING = (
    Seam(
        "vllm.engine.arg_utils:EngineArgs",
        "flags that the launcher reads",
        attributes="additional_config data_parallel_multi_port_external_lb data_parallel_rank "
        "data_parallel_size data_parallel_size_local dtype enable_dbo enable_eplb "
        "enable_expert_parallel kv_cache_memory_bytes max_model_len nnodes "
        "pipeline_parallel_size tensor_parallel_size ubatch_size",
    ),
    Seam(
        "vllm.envs",
        "variables that the launcher sets or reads",
        attributes="VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_PLUGINS "
        "VLLM_TUNED_CONFIG_FOLDER VLLM_WORKER_MULTIPROC_METHOD",
    ),
    Seam(
        "vllm.entrypoints.openai.api_server",
        "the server that the launcher starts",
        mentions="__main__",
    ),
    Seam(
        "vllm.entrypoints.cli.serve",
        "ranks of hosts without a server",
        attributes="ServeSubcommand make_arg_parser validate_parsed_serve_args",
    ),
    Seam(
        "vllm.entrypoints.cli.serve:ServeSubcommand.cmd",
        "ranks of hosts without a server",
        passed="args",
    ),
    Seam(
        "vllm.entrypoints.cli.serve:make_arg_parser",
        "ranks of hosts without a server",
        passed="parser",
    ),
    Seam(
        "vllm.entrypoints.cli.serve:validate_parsed_serve_args",
        "ranks of hosts without a server",
        passed="args",
    ),
    Seam("vllm.utils.argparse_utils:FlexibleArgumentParser", "ranks of hosts without a server"),
    Seam(
        f"{_MOE}.fused_moe:get_moe_configs",
        "where kernels' tuned settings are looked for",
        mentions="VLLM_TUNED_CONFIG_FOLDER configs",
    ),
)
SEAMS = (
    *_SWITCHING_ON,
    *_BUILDING,
    *_LAYERS,
    *_ON_CPU,
    *_ON_GPU,
    *_RUNNING,
    *_STARTING,
)
