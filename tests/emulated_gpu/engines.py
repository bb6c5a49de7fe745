"""How ``values`` starts an engine, and what it asks of it: tokens for tokens."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine import GRAPHS, sharing

from tests.emulated_gpu.plugin import DISPATCH
from ultraep_serve.config import CONFIG_VARIABLE, BalanceConfig

__all__ = ["Engine", "Tokens", "Way", "start"]

CONTEXT, CHUNK, MOST_SEQUENCES, CACHE_TOKENS = 2048, 160, 16, 8192  # prefill is cut into chunks
TYPE = "float32"  # in bfloat16 the two likeliest tokens are often equally likely
VLLM = {
    "max_model_len": CONTEXT,
    "max_num_seqs": MOST_SEQUENCES,
    "max_num_batched_tokens": CHUNK,
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 1 << 26,
    "enable_expert_parallel": True,
    "disable_custom_all_reduce": True,
}
SGLANG = {
    "device": "cuda",
    "context_length": CONTEXT,
    "max_running_requests": MOST_SEQUENCES,
    "chunked_prefill_size": CHUNK,
    "mem_fraction_static": 0.3,
    "max_total_tokens": CACHE_TOKENS,
    "disable_custom_all_reduce": True,
    "disable_prefill_cuda_graph": True,
    "disable_shared_experts_fusion": True,
    "attention_backend": "triton",
    "moe_runner_backend": "triton",
    "sampling_backend": "pytorch",
}
KERNELS = {  # vLLM's --moe-backend, by the format of experts: those that have references
    **dict.fromkeys(("fp8", "fp8-tensor", "int8"), "triton"),
    **dict.fromkeys(("int4", "awq", "mxfp4", "nvfp4"), "marlin"),
}
BEHIND_DEEPEP = {
    "moe_a2a_backend": "deepep",
    "deepep_dispatcher_output_dtype": "bf16",
    "moe_runner_backend": "deep_gemm",
}
WITH: dict[str, dict[str, Any]] = {  # flags of dispatches that need kernels of their own
    "flashinfer_nvlink_one_sided": {"moe_backend": "flashinfer_cutlass"},
    "passthrough": {"moe_backend": "flashinfer_moe_ep_cutedsl"},  # which dispatches itself
    "deepep": {**BEHIND_DEEPEP, "deepep_mode": "normal"},  # with which SGLang captures no graphs
    "deepep auto": {**BEHIND_DEEPEP, "deepep_mode": "auto"},  # decode by its low latency
}
Tokens = list[list[int]]  # of each prompt


@dataclass(frozen=True)
class Way:
    """How an engine serves."""

    engine: str = "vllm"
    parallel: str = "tensor"
    runner: int = 2  # of vLLM's two model runners
    decode_in_graphs: bool = False
    ranks: int = 2
    mistakes: Sequence[str] = ()
    dispatch: str = ""  # vLLM's --all2all-backend, or of ``WITH``: by a reference of its library
    domain_size: int = 0  # ranks that weights move between; 0: all
    slot_memory: str = "auto"  # of each layer's own, because there is memory for them
    format: str = ""  # of experts, one of ``KERNELS``
    may_capture: bool = False  # so DeepEP v2 leaves rows as they were sent; nothing is captured
    prefix_cache: bool = False  # where prompts are asked again, their beginnings are not computed
    prompts: int = 12
    experts_per_token: int = 2  # plans are as good as 2 %, of many assignments or few

    @property
    def name(self) -> str:
        runner = f", V{self.runner} runner" if self.engine == "vllm" else ""
        batches = "decode in CUDA graphs" if self.decode_in_graphs else "eager"
        ways = f"{self.engine}, {self.ranks} {self.parallel}-parallel ranks{runner}, {batches}"
        ways += f", domains of {self.domain_size}" if self.domain_size else ""
        ways += ", prefix cache" if self.prefix_cache else ""
        ways += ", shared slots" if self.slot_memory == "shared" else ""
        layout = " (rows as sent)" if self.may_capture else ""
        ways += f", experts in {self.format}" if self.format else ""
        return f"{ways}, {self.dispatch}{layout}" if self.dispatch else ways

    @property
    def dtype(self) -> str:
        """The libraries combine in bfloat16, and vLLM's Marlin takes no float32."""
        is_less = self.dispatch or KERNELS.get(self.format) == "marlin"
        return "bfloat16" if is_less else TYPE

    @property
    def processes(self) -> int:
        """That are started here: a data-parallel rank is a vLLM of its own, on the same GPU."""
        return self.ranks if (self.engine, self.parallel) == ("vllm", "data") else 1

    @property
    def sizes(self) -> dict[str, int]:
        """Of the model: with DeepEP a number of 512 bytes, or its low latency's least one (vLLM
        pads others to that, over weights that nobody wrote); with formats several groups a row.

        vLLM takes an expert that is one group wide for one that has one scale a row (Marlin).
        """
        if self.format:
            return {"hidden_size": 256, "moe_intermediate_size": 256}
        hidden = {"": 128, "deepep_low_latency": 2048}
        return {"hidden_size": hidden.get(self.dispatch, 256)}

    def environment(self, rank: int, port: int) -> dict[str, str]:
        own = {"VLLM_USE_V2_MODEL_RUNNER": str(self.runner - 1)}
        # SGLang's cache in Rust asks tensors of the emulated GPU for a type that they lack
        own |= {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
        if self.dispatch:
            own |= {DISPATCH: "1", "EP_DISABLE_GIN": "1"}  # the emulated NCCL has no GIN
            own |= {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}  # nothing is to be compiled
        if self.processes > 1:
            return own | sharing(rank, port)
        return own | {"EMULATED_GPU_DEVICES": str(self.ranks)}


class Engine(Protocol):
    """One that has been started, with balancing as in its settings."""

    cached: int  # tokens of prompts that were taken from the prefix cache

    def generate(self, prompts: Tokens, number: int) -> Tokens:
        """As many tokens for each prompt, the likeliest ones."""

    def end(self) -> None:
        """A process waits at its end for an engine that lives on."""


def start(model: str, way: Way, settings: dict[str, Any]) -> Engine:
    """Start an engine with ``settings`` of balancing."""
    return {"vllm": _Vllm, "sglang": _Sglang}[way.engine](model, way, settings)


class _Vllm:
    def __init__(self, model: str, way: Way, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self.cached = 0
        own: dict[str, Any] = {"enforce_eager": True}
        if way.decode_in_graphs:
            own = {"compilation_config": GRAPHS}
        if way.may_capture:
            own = {"compilation_config": {"mode": 0, "cudagraph_mode": "NONE"}}
        own["tensor_parallel_size"] = way.ranks if way.parallel == "tensor" else 1
        own["enable_prefix_caching"] = way.prefix_cache
        own["moe_backend"] = KERNELS.get(way.format, "auto")
        if way.dispatch:
            own |= {"all2all_backend": way.dispatch, **WITH.get(way.dispatch, {})}
        own = {**VLLM, "dtype": way.dtype, **own, "additional_config": {"ultraep": settings}}
        self._engine = LLM(model, **own)

    def generate(self, prompts: Tokens, number: int) -> Tokens:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=number, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = self._engine.generate(asked, greedy, use_tqdm=False)
        self.cached += sum(each.num_cached_tokens or 0 for each in done)
        return [list(each.outputs[0].token_ids) for each in done]

    def end(self) -> None:
        self._engine.llm_engine.engine_core.shutdown()


class _Sglang:
    def __init__(self, model: str, way: Way, settings: dict[str, Any]) -> None:
        os.environ[CONFIG_VARIABLE] = BalanceConfig(**settings).to_json()
        import sglang

        self.cached = 0
        own: dict[str, Any] = {"cuda_graph_bs_decode": [1, 2, 4, 8, MOST_SEQUENCES]}
        if not way.decode_in_graphs:
            own = {"disable_decode_cuda_graph": True}
        if way.parallel == "data":
            own |= {"dp_size": way.ranks, "enable_dp_attention": True}  # as its guides write it
        if way.dispatch:
            own |= WITH[way.dispatch]
        own |= {"tp_size": way.ranks, "ep_size": way.ranks, "dtype": way.dtype}
        own["disable_radix_cache"] = not way.prefix_cache
        self._engine = sglang.Engine(model_path=model, **(SGLANG | own))

    def generate(self, prompts: Tokens, number: int) -> Tokens:
        greedy = {"temperature": 0, "max_new_tokens": number, "ignore_eos": True}
        done = self._engine.generate(input_ids=prompts, sampling_params=greedy)
        self.cached += sum(each["meta_info"]["cached_tokens"] for each in done)
        return [each["output_ids"] for each in done]

    def end(self) -> None:
        self._engine.shutdown()
