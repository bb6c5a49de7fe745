"""vLLM's native megakernel on two ranks: its module over slots, and the balancer of a GPU.

Answers are compared, bit for bit, with those of the same module before it was balanced: of prefill,
again and again, and of decode in a CUDA graph. Work is held back by seed. An adapter that does not
wait for copies must show with one of a few seeds, and one that does not map ids with any.
"""

import os
from pathlib import Path
from typing import Any

import torch

from tests.emulated_gpu.operators.host import in_stream
from tests.emulated_gpu.references import mega_moe as deep_gemm
from tests.support.experts import ALWAYS_PAYS
from tests.support.hosts import engine_group, meet_in
from tests.support.ranks import fresh_run_path, run_ranks

__all__ = ["check_mega_moe"]

RANKS, SLOTS, THRESHOLD, TURNS = 2, 2, 24, 2
SEEDS, MOST_SEEDS, SECONDS = (0, 1), range(1, 6), 280.0  # 0 holds nothing back
MEMORIES = "per_layer", "shared"
NOT_MAPPED, NOT_AWAITED = "ids as they come", "copies not awaited"


def check_mega_moe() -> dict[str, Any]:
    """Seeds with which each mistake shows. Raises where one does not, or anything else is wrong."""
    samples = 0
    for memory in MEMORIES:
        for seed in SEEDS:
            for found in served(seed, memory):
                if found["wrong"] or found["failures"]:
                    raise RuntimeError(f"with {memory} slots, seed {seed}: {found}")
                samples += found["samples"]
    if not samples:
        raise RuntimeError("nothing was sampled")
    shown = {
        mistake: next((seed for seed in MOST_SEEDS if is_wrong(seed, mistake)), 0)
        for mistake in (NOT_MAPPED, NOT_AWAITED)
    }
    if missed := [mistake for mistake, seed in shown.items() if not seed]:
        raise RuntimeError(f"no seed has shown {missed}")
    return {"seeds": len(SEEDS), "samples": samples, "mistakes": shown}


def served(seed: int, memory: str, mistake: str = "") -> list[dict[str, Any]]:
    with fresh_run_path() as path:
        return run_ranks(serve, RANKS, str(path), seed, memory, mistake, timeout_seconds=SECONDS)


def is_wrong(seed: int, mistake: str) -> bool:
    return any(found["wrong"] for found in served(seed, "shared", mistake))


def serve(rank: int, run_dir: str, seed: int, memory: str, mistake: str) -> dict[str, Any]:
    """What is wrong with this rank's answers, and its samples."""
    from vllm.config import set_current_vllm_config

    from tests.support import vllm_mega_moe as mega
    from tests.support.vllm_transports import MEGA, join_ranks
    from ultraep_serve.config import BalanceConfig
    from ultraep_serve.engines.vllm import model
    from ultraep_serve.sidecar.proof import verification_of
    from ultraep_serve.telemetry.reader import RingReader

    torch.set_num_threads(1)
    if seed:
        os.environ["EMULATED_GPU_HOLDS"] = str(2 * seed + rank)
    engine_group(run_dir, rank, RANKS)
    meet_in(run_dir)
    join_ranks(rank, RANKS, MEGA)
    for name in ("stage_inputs", "fp8_fp4_mega_moe"):
        setattr(deep_gemm, name, in_stream(getattr(deep_gemm, name)))
    mega.install(lambda _: None)
    config = mega.config_of(rank, RANKS)
    settings = BalanceConfig(
        slots=SLOTS,
        min_batch_tokens=THRESHOLD,
        costs=ALWAYS_PAYS,
        slot_memory="per_layer" if memory == "per_layer" else "shared",
        self_check="full",
        verify_every=0 if mistake else 1,
    )
    with torch.inference_mode(), set_current_vllm_config(config):
        with torch.device("cuda", 0):
            layers = [mega.build(config, number)[0] for number in range(2)]
        off = {name: [mega.run_batch(each, config, name) for each in layers] for name in SIZES}
        balanced = model.balance(settings, config, layers)
        decode = Decode(layers, config)
        balanced.end_loading(model.logger)
        make_mistake(mistake)
        wrong = []
        for turn in range(TURNS):
            found = {
                name: [mega.run_batch(each, config, name) for each in layers] for name in SIZES
            }
            found["small"] = decode()
            wrong += [
                f"{name}, turn {turn}"
                for name in SIZES
                if not all(map(torch.equal, found[name], off[name]))
            ]
        balanced.require_in_place()
    header = RingReader(Path(run_dir, f"ring-{rank}")).header()
    samples = verification_of([header], is_off=False)
    return {"wrong": wrong, "samples": samples.layers, "failures": samples.failures}


SIZES = "large", "uneven", "small"


class Decode:
    """The small batch of all layers in a CUDA graph."""

    def __init__(self, layers: list[Any], config: Any) -> None:
        from tests.support import vllm_mega_moe as mega

        given = mega.tokens_of(config.parallel_config.data_parallel_rank, "small")
        parts = [part.to("cuda") for part in (given.x, given.weights, given.ids)]
        self._graph = torch.cuda.CUDAGraph()
        with (
            mega.forward_pass(config, "small", torch.device("cuda", 0)),
            torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
        ):
            self._outputs = [layer(*parts, None) for layer in layers]

    def __call__(self) -> list[torch.Tensor]:
        self._graph.replay()
        return [output.float().cpu() for output in self._outputs]


def make_mistake(name: str) -> None:
    """Have the adapter be wrong in the way of that name."""
    from ultraep_serve.balance.cuda.micro_batch import MicroBatch
    from ultraep_serve.engines.vllm.stage import VllmFlow

    route = VllmFlow.route
    if name == NOT_MAPPED:
        VllmFlow.route = lambda *of: (route(*of), of[2])[1]  # type: ignore[method-assign]
    if name == NOT_AWAITED:
        MicroBatch.receive = lambda *_: None  # type: ignore[method-assign]
