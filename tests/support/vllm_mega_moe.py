"""Modules of vLLM's native megakernel, loaded by vLLM's own code, over a reference of DeepGEMM."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import DPMetadata, create_forward_context, override_forward_context
from vllm.model_executor.layers.fused_moe import deep_gemm_mega_moe
from vllm.utils import deep_gemm as library

from tests.emulated_gpu.references import mega_moe as deep_gemm
from tests.support import vllm_layers
from tests.support.experts import NUM_EXPERTS, TOP_K, Batch, make_batch
from tests.support.vllm_gpu import NAMES

__all__ = [
    *("BATCHES", "HIDDEN", "INNER", "MAX_TOKENS", "PADDED"),
    *("build", "config_of", "forward_pass", "install", "run_batch", "tokens_of"),
]

HIDDEN, INNER, MAX_TOKENS = 128, 128, 64
BATCHES = {"large": 30, "uneven": 30, "small": 2}  # tokens of a rank; of the first one
PADDED = 3  # tokens that vLLM has added to a large batch
_SHARDS = {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w2": (HIDDEN, INNER)}


def install(
    launched: Callable[[torch.Tensor], object], set_attribute: Callable[..., object] = setattr
) -> None:
    """Have vLLM's module find the reference, on a GPU that takes it.

    ``launched`` is told of the ids that vLLM stages, before the kernel is launched.
    """

    def stage(x: Any, weights: Any, ids: torch.Tensor, *of: Any, **named: Any) -> None:
        launched(ids.clone())
        deep_gemm.stage_inputs(x, weights, ids, *of, **named)

    set_attribute(deep_gemm_mega_moe, "prepare_megamoe_inputs", stage)
    set_attribute(deep_gemm_mega_moe, "check_deep_gemm_mega_moe_supported", lambda *_: None)
    set_attribute(library, "_import_deep_gemm", lambda: deep_gemm)


def config_of(rank: int, num_ranks: int) -> VllmConfig:
    """vLLM's configuration of one of several data-parallel ranks."""
    config = vllm_layers.engine_config(rank, num_ranks, "", NAMES)
    config.parallel_config.data_parallel_size = num_ranks
    config.parallel_config.data_parallel_rank = rank
    config.scheduler_config.max_num_batched_tokens = MAX_TOKENS
    return config


def build(config: VllmConfig, seed: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """A rank's module, its experts loaded, and what they all stand for: (E, ...) in float32."""
    parallel, name = config.parallel_config, NAMES[seed]
    num_local = NUM_EXPERTS // parallel.data_parallel_size
    module: Any = deep_gemm_mega_moe
    layer = module.DeepGemmMegaMoEExperts(
        config,
        num_experts=NUM_EXPERTS,
        num_local_experts=num_local,
        experts_start_idx=parallel.data_parallel_rank * num_local,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        activation=module.MegaMoEActivation(clamp=10.0),
        weight_format=module.MEGA_MOE_MXFP4,
        prefix=name,
    )
    random, plain = torch.Generator().manual_seed(seed), {shard: [] for shard in _SHARDS}
    for expert in range(NUM_EXPERTS):
        for shard, (rows, columns) in _SHARDS.items():
            weight = torch.randint(256, (rows, columns // 2), generator=random, device="cpu")
            scale = torch.randint(120, 123, (rows, columns // 32), generator=random, device="cpu")
            tensors = {"weight": weight.to(torch.uint8), "weight_scale": scale.to(torch.uint8)}
            for kind, tensor in tensors.items():
                own = f"{'w2' if shard == 'w2' else 'w13'}_{kind}"
                parameter = getattr(layer, own)
                parameter.weight_loader(parameter, tensor, f"{name}.{own}", shard, expert)
            packed = tensors["weight_scale"].view(torch.int32)
            plain[shard].append(deep_gemm.values(deep_gemm.fp4(tensors["weight"]), packed))
    w1, w3, w2 = (torch.stack(plain[shard]) for shard in ("w1", "w3", "w2"))
    return layer, {"w13_weight": torch.cat([w1, w3], 1), "w2_weight": w2}


def tokens_of(rank: int, batch: str) -> Batch:
    """What the router of ``rank`` gives, for tokens that are the same in FP8."""
    tokens = 1 if batch == "uneven" and rank == 0 else BATCHES[batch]
    made = make_batch(rank, tokens, HIDDEN, torch.int64)
    return replace(made, x=made.x.to(torch.float8_e4m3fn).to(made.x.dtype))


def run_batch(layer: Any, config: VllmConfig, batch: str) -> torch.Tensor:
    """The output (T, H) of this rank's tokens, of which the last few may be padding."""
    device = layer.w13_weight.device
    given = tokens_of(config.parallel_config.data_parallel_rank, batch)
    with forward_pass(config, batch, device), torch.inference_mode():
        parts = (part.to(device) for part in (given.x, given.weights, given.ids))
        output: torch.Tensor = layer(*parts, None)
    return output.float().cpu()


@contextmanager
def forward_pass(config: VllmConfig, batch: str, device: torch.device) -> Iterator[None]:
    """vLLM's context of a batch; of a large one the last tokens are its own."""
    parallel = config.parallel_config
    sizes = [len(tokens_of(rank, batch).ids) for rank in range(parallel.data_parallel_size)]
    own = sizes[parallel.data_parallel_rank]
    is_padding = torch.arange(own, device=device) >= own - PADDED * (batch == "large")
    metadata = DPMetadata(torch.tensor(sizes, device="cpu"))
    context = create_forward_context(None, config, metadata, is_padding=is_padding)
    with override_forward_context(context):
        yield
