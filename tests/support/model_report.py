"""What a made-up checkpoint does with held-out text: loads and imbalance of every layer."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ultraep_lab.demo.gates import NUM_HOT, one_thread
from ultraep_lab.demo.models import SMALL_HIDDEN_SIZE
from ultraep_lab.demo.spec import ModelSpec
from ultraep_lab.demo.text import sample_text
from ultraep_serve.types import IntArray, imbalance

__all__ = ["LayerReport", "measure_model"]

TEXT_TOKENS = 2048
HELD_OUT_SEED = 100_000


@dataclass(frozen=True)
class LayerReport:
    """What one MoE layer does with held-out text of one domain."""

    layer: int  # index of the decoder layer
    domain: str
    imbalance: float  # max/mean of assignments over ranks
    hot_rank: int  # the rank with most assignments
    hot_experts: tuple[int, ...]  # the hot rank's busiest experts, busiest first
    movable: float  # share of all assignments that the hot experts attract
    excess: float  # share of all assignments that the hot rank has above the mean

    @classmethod
    def of(cls, layer: int, domain: str, load: IntArray, spec: ModelSpec) -> "LayerReport":
        """Of ``load`` (E,)."""
        per_rank = load.reshape(spec.num_ranks, spec.experts_per_rank)
        rank_load = per_rank.sum(1)
        hot = int(rank_load.argmax())
        order = np.argsort(-per_rank[hot], kind="stable")[:NUM_HOT]
        return cls(
            layer,
            domain,
            imbalance=imbalance(rank_load),
            hot_rank=hot,
            hot_experts=tuple((order + hot * spec.experts_per_rank).tolist()),
            movable=float(per_rank[hot][order].sum() / load.sum()),
            excess=float(rank_load[hot] / load.sum()) - 1 / spec.num_ranks,
        )


def measure_model(path: Path, spec: ModelSpec, num_texts: int) -> list[LayerReport]:
    """Every MoE layer with ``num_texts`` held-out texts of every domain, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    reports = []
    with one_thread(spec.hidden_size <= SMALL_HIDDEN_SIZE):
        for domain in spec.domains:
            seeds = range(HELD_OUT_SEED, HELD_OUT_SEED + num_texts)
            texts = (sample_text(domain, TEXT_TOKENS, seed) for seed in seeds)
            ids = torch.tensor([tokenizer.encode(text) for text in texts])
            reports += [
                LayerReport.of(layer, domain, load, spec)
                for layer, load in _loads(model, ids, spec)
            ]
    return reports


def _loads(model: Any, ids: Tensor, spec: ModelSpec) -> Iterator[tuple[int, IntArray]]:
    """Every MoE layer and its assignments per expert (E,), for ``ids`` (N, T)."""
    loads: dict[int, IntArray] = {}

    def counting(layer: int) -> Callable[[Any, Any, tuple[Tensor, ...]], None]:
        def count(_module: Any, _args: Any, output: tuple[Tensor, ...]) -> None:
            chosen = output[2].flatten().bincount(minlength=spec.num_experts)
            loads[layer] = chosen.numpy().astype(np.int32)

        return count

    with ExitStack() as hooks, torch.inference_mode():
        for layer in spec.moe_layers:
            gate = model.model.layers[layer].mlp.gate
            hooks.callback(gate.register_forward_hook(counting(layer)).remove)
        model.model(ids, use_cache=False)
    return iter(loads.items())
