"""What a GPU would bring to SGLang's objects: transports between processes, and expert kernels.

Everything else in these layers is SGLang's own: settings, layers, quantisation methods, runners'
configuration, dispatchers, the plugin registry.
"""

import pkgutil
import warnings
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.emulated_gpu.references.deep_ep import install_deep_ep
from tests.support.experts import NUM_EXPERTS, TOP_K, Batch, sum_of_experts, swiglu
from ultraep_serve.types import ExpertShape

install_deep_ep()  # in the processes of ranks too

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when SGLang has it compile
    import sglang.srt.managers.scheduler  # noqa: F401 - whose warnings are its own
    from sglang.kernels.ops.quantization import fp8_kernel
    from sglang.srt.hardware_backend.gpu.quantization import gptq_kernels
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.token_dispatcher import standard
    from sglang.srt.layers.moe.token_dispatcher.deepep import (
        DeepEPLLCombineInput,
        DeepEPNormalCombineInput,
    )
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.layers.quantization import marlin_utils, marlin_utils_fp4, modelopt_quant, mxfp4
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
    from sglang.srt.managers.scheduler_components.dp_attn import MLPSyncBatchInfo
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_context, get_parallel, get_resources

    from ultraep_serve.config import BalanceConfig
    from ultraep_serve.engines.sglang import checks, hooks, model
    from ultraep_serve.engines.sglang.stage import PrefillTokens, SglangFlow

HIDDEN, INNER = 256, 128
SHAPE = ExpertShape(num_ranks=3, num_logical_experts=NUM_EXPERTS, num_replica_slots=2)
DEEPEP = {"moe_a2a_backend": "deepep", "moe_runner_backend": "deep_gemm", "attn_dp_size": 3}


def pretend_gpu(set_attribute: Any) -> None:
    """The adapter and SGLang as on an NVIDIA GPU with DeepGEMM, as far as Python asks."""
    for module in (hooks, model, checks):
        set_attribute(module, "is_cpu", lambda: False)
    set_attribute(checks, "is_cuda", lambda: True)
    set_attribute(standard, "get_device", lambda: "cpu")
    set_attribute(deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True)
    device = SimpleNamespace(multi_processor_count=132)
    set_attribute(torch.cuda, "get_device_properties", lambda *_, **__: device)


def pretend_repacking(set_attribute: Any) -> None:
    """A Hopper or Blackwell GPU, and its kernels that prepare quantised weights.

    Of the latter only what they may look at is the same: one expert's tensor.
    """
    platform = SimpleNamespace(is_sm90=True, is_sm100=False, is_sm120=False, is_blackwell=True)
    for module in (modelopt_quant, mxfp4):
        set_attribute(module, "get_platform", lambda: platform)
    set_attribute(marlin_utils, "get_device_capability", lambda: (9, 0))
    for module in (gptq_kernels, marlin_utils_fp4):
        set_attribute(module, "gptq_marlin_repack", _repack)
    set_attribute(
        import_module("sglang.kernels.ops.quantization.awq_marlin_repack"),
        "awq_marlin_repack",
        lambda weight, *sizes: _repack(weight, None, *sizes),
    )
    set_attribute(fp8_kernel, "sgl_per_tensor_quant_fp8", _quantise_fp8)


def _repack(
    b_q_weight: torch.Tensor, perm: torch.Tensor | None, size_k: int, size_n: int, num_bits: int
) -> torch.Tensor:
    """Marlin's shape (K / 16, N * 16 / P) with P weights in an int32."""
    order = torch.arange(b_q_weight.numel()).flip(0)
    return b_q_weight.reshape(-1)[order].view(size_k // 16, size_n * num_bits // 2)


def _quantise_fp8(x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, is_static: bool) -> None:
    assert is_static
    out.copy_((x.float() / scale).to(out.dtype))


def note_kernel_calls(layer: FusedMoE, set_attribute: Any, taken: list[Any]) -> None:
    """What ``layer``'s kernel is given goes to ``taken``; it computes zeros."""

    def marlin(hidden_states: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        taken.append((rest, named))
        return torch.zeros_like(hidden_states)

    def run(dispatched: Any, weights: Any, lora_info: Any = None) -> Any:
        taken.append(weights)
        return StandardCombineInput(torch.zeros_like(dispatched.hidden_states))

    module = import_module("sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe")
    set_attribute(module, "fused_marlin_moe", marlin)
    for runner in {layer.runner, getattr(layer.scheme, "runner", None)} - {None}:
        if layer.runner_backend.is_marlin():
            vars(runner).pop("run", None)  # SGLang's own, up to the kernel
        else:
            runner.run = run


class Ranks:
    """SGLang's tensor-parallel group, as far as dispatch and schedulers use it."""

    def __init__(self, num_ranks: int) -> None:
        self.world_size = num_ranks
        alone: Any = SimpleNamespace(get_group_store=lambda: None)
        self.device_group = self.cpu_group = dist.group.WORLD if dist.is_initialized() else alone
        self.active_ranks = self.active_ranks_cpu = torch.ones(num_ranks)


def publish(rank: int = 0, **changes: Any) -> Any:
    """SGLang's settings of one rank, resolved and published; returns them."""
    num_ranks = SHAPE.num_ranks
    values: dict[str, Any] = {
        "tp_size": num_ranks,
        "ep_size": num_ranks,
        "moe_runner_backend": "triton",
        "disable_prefill_cuda_graph": True,
        **changes,
    }
    parallel = get_parallel()
    parallel.clear_stamp()
    server_args = get_context().override_server_args(**values).install()
    parallel.override_permanently(
        moe_ep_size=num_ranks,
        moe_ep_rank=rank,
        moe_tp_size=1,
        moe_tp_rank=0,
        tp_rank=rank,
        tp_group=Ranks(num_ranks),
        world_group=Ranks(num_ranks),
        moe_ep_group=Ranks(num_ranks),
    )
    get_resources().buffers.pop("deepep_ep_state", None)
    initialize_moe_config()
    return server_args


def build_layer(layer_id: int, quant_config: Any = None, **options: Any) -> FusedMoE:
    """A layer as SGLang's models build it under the published settings; weights not loaded."""
    with torch.device("cpu"):
        layer = get_moe_impl_class(quant_config)(
            num_experts=NUM_EXPERTS,
            top_k=TOP_K,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            layer_id=layer_id,
            params_dtype=torch.bfloat16,
            quant_config=quant_config,
            prefix=f"model.layers.{layer_id}.mlp.experts",
            **options,
        )
    if isinstance(layer.quant_method, UnquantizedFusedMoEMethod):
        layer.quant_method._forward_method = layer.quant_method.forward_cuda
    if layer.runner is not None:
        layer.runner.run = ReferenceRunner(layer.moe_runner_config)
    return layer


def layers_of() -> model._Layers:
    """What tells layers of slots and computes them, with no other rank."""
    group: Any = SimpleNamespace()
    return model._Layers(BalanceConfig(), SglangFlow(PrefillTokens()), group)


def loaded_layer(quant_config: Any = None, **changes: Any) -> FusedMoE:
    """A layer of rank 0 under such settings, weights loaded, not yet balanced."""
    publish(**changes)
    layer = build_layer(0, quant_config)
    for parameter in layer.parameters():
        parameter.data.fill_(1)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def load(layer: FusedMoE, tensors: dict[str, torch.Tensor]) -> None:
    """Fill parameters from ``tensors`` (E, ...) by name, then do what SGLang's loader does."""
    first = layer.moe_ep_rank * layer.num_local_experts
    for name, tensor in tensors.items():
        getattr(layer, name).data.copy_(tensor[first : first + layer.num_local_experts])
    layer.quant_method.process_weights_after_loading(layer)


class ReferenceRunner:
    """SwiGLU experts in float32 torch, with the contract that SGLang's runners have."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __call__(self, dispatched: Any, weights: Any, lora_info: Any = None) -> Any:
        w13, w2 = weights.w13_weight, weights.w2_weight
        num_local = self.config.num_local_experts
        assert w13.shape[0] == w2.shape[0] == num_local
        if dispatched.format.is_deepep_ll():
            assert dispatched.masked_m.numel() == num_local
            rows = torch.zeros(dispatched.hidden_states.shape)
            for e, count in enumerate(dispatched.masked_m.tolist()):
                rows[e, :count] = swiglu(dispatched.hidden_states[e, :count], w13[e], w2[e])
            return DeepEPLLCombineInput(rows, dispatched.topk_ids, dispatched.topk_weights)
        if dispatched.format.is_deepep_normal():
            assert len(dispatched.num_recv_tokens_per_expert) == num_local
            ids, scales = dispatched.topk_ids, dispatched.topk_weights
            total = _sum(dispatched.hidden_states, ids, scales, w13, w2)
            return DeepEPNormalCombineInput(total, ids, scales)
        scales, ids, _ = dispatched.topk_output
        local = self._local(ids)
        total = _sum(dispatched.hidden_states, local, scales, w13, w2)
        return StandardCombineInput(total)

    def _local(self, ids: torch.Tensor) -> torch.Tensor:
        """FlashInfer's kernels take global ids, of which each rank has as many as weights."""
        if not self.config.runner_backend.is_flashinfer_cutlass():
            return ids
        num_local = self.config.num_local_experts
        assert self.config.num_experts == num_local * self.config.moe_ep_size
        local = ids - self.config.moe_ep_rank * num_local
        return torch.where((ids >= 0) & (local >= 0) & (local < num_local), local, -1)


def _sum(
    x: torch.Tensor, local: torch.Tensor, scales: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    assert not bool((local >= w13.shape[0]).any()), "an id beyond the local experts"
    return sum_of_experts(x, local, scales, lambda rows, e: swiglu(rows, w13[e], w2[e]))


def topk_of(batch: Batch) -> StandardTopKOutput:
    """The choices of ``batch`` as SGLang's router gives them."""
    return StandardTopKOutput(batch.weights, batch.ids, batch.weights)


def in_registry(own: hooks._SchedulerHooks, target: str) -> None:
    """SGLang's registry puts the hook in place, in place of that of the settings before."""
    hook, kind = own.by_target()[target]
    _restore(target)
    HookRegistry._hooks.pop(target, None)
    HookRegistry._patched.discard(target)
    HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
    assert hooks._is_in_place(target, hook)


def _restore(target: str) -> None:
    owner, name = target.rsplit(".", 1)
    current = pkgutil.resolve_name(target)
    setattr(pkgutil.resolve_name(owner), name, getattr(current, "__wrapped__", current))


def gather(mode: ForwardMode, num_tokens: int) -> MLPSyncBatchInfo:
    """SGLang's own exchange between schedulers."""
    info = MLPSyncBatchInfo(
        num_dp_ranks=SHAPE.num_ranks,
        tp_size=1,
        cp_size=1,
        num_tokens=num_tokens,
        num_tokens_for_logprob=num_tokens,
        can_run_decode_cuda_graph=False,
        can_run_draft_cuda_graph=False,
        can_run_prefill_cuda_graph=False,
        is_extend_in_batch=mode.is_extend(),
        local_can_run_tbo=False,
        local_forward_mode=mode.value,
    )
    info.all_gather("cpu", dist.group.WORLD)
    return info
