"""What a made-up checkpoint does with held-out text: loads and imbalance of every layer."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ultraep_serve.lab.demo.gates import NUM_HOT, one_thread
from ultraep_serve.lab.demo.models import SMALL_HIDDEN_SIZE
from ultraep_serve.lab.demo.spec import ModelSpec
from ultraep_serve.lab.demo.text import sample_text
from ultraep_serve.types import IntArray, imbalance

__all__ = ["ModelReport", "measure_model"]

HELD_OUT_SEED = 100_000


@dataclass(frozen=True)
class LayerReport:
    """What one MoE layer does with held-out text of one domain."""

    layer: int  # index of the decoder layer
    domain: str
    loads: tuple[int, ...]  # (E,) assignments per expert
    imbalance: float  # max/mean of assignments over ranks
    hot_rank: int  # the rank with most assignments
    hot_experts: tuple[int, ...]  # the hot rank's busiest experts, busiest first
    movable: float  # share of all assignments that the hot experts attract
    excess: float  # share of all assignments that the hot rank has above the mean

    @property
    def can_be_levelled(self) -> bool:
        """Whether copies of the hot experts alone could bring the hot rank down to the mean."""
        return self.movable >= self.excess


@dataclass(frozen=True)
class ModelReport:
    """A checkpoint and its routing, measured on held-out text through transformers."""

    path: Path
    spec: ModelSpec
    layers: tuple[LayerReport, ...]  # every MoE layer of every domain

    def layer(self, layer: int, domain: str) -> LayerReport:
        """The report of one layer and domain. Raises KeyError when there is none."""
        for report in self.layers:
            if (report.layer, report.domain) == (layer, domain):
                return report
        raise KeyError((layer, domain))

    @property
    def worst_error(self) -> float:
        """Largest relative distance of a measured imbalance from the spec's."""
        return max(abs(entry.imbalance / self.spec.imbalance - 1) for entry in self.layers)

    def table(self) -> str:
        """One line per layer and domain, for people."""
        lines = ["layer domain     imbalance hot rank  hot experts  movable  excess"]
        for entry in self.layers:
            experts = ",".join(map(str, entry.hot_experts))
            lines.append(
                f"{entry.layer:5d} {entry.domain:10s} {entry.imbalance:9.3f} {entry.hot_rank:8d} "
                f"{experts:>12s} {entry.movable:8.1%} {entry.excess:7.1%}"
            )
        return "\n".join(lines)


def measure_model(
    path: str | Path, spec: ModelSpec, num_tokens: int = 4096, batch_tokens: int = 1024
) -> ModelReport:
    """Measure a written checkpoint again, in float32, on ``num_tokens`` held-out tokens per domain.

    They run as texts of ``batch_tokens`` tokens each.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    with one_thread(spec.hidden_size <= SMALL_HIDDEN_SIZE):
        layers = _measure(model, Path(path), spec, num_tokens, batch_tokens)
    return ModelReport(Path(path), spec, layers)


def _measure(
    model: Any, path: Path, spec: ModelSpec, num_tokens: int, batch_tokens: int
) -> tuple[LayerReport, ...]:
    reports = []
    for domain in spec.domains:
        seeds = range(HELD_OUT_SEED, HELD_OUT_SEED + max(1, num_tokens // batch_tokens))
        ids = load_ids(path, [sample_text(domain, batch_tokens, seed) for seed in seeds])
        loads = expert_loads(model, ids, spec)
        reports += [_report(layer, domain, load, spec) for layer, load in loads.items()]
    return tuple(reports)


def _report(layer: int, domain: str, load: IntArray, spec: ModelSpec) -> LayerReport:
    """``load`` (E,) of one layer, summed up."""
    per_rank = load.reshape(spec.num_ranks, spec.experts_per_rank)
    rank_load = per_rank.sum(1)
    hot = int(rank_load.argmax())
    order = np.argsort(-per_rank[hot], kind="stable")[:NUM_HOT]
    total = int(load.sum())
    return LayerReport(
        layer=layer,
        domain=domain,
        loads=tuple(int(count) for count in load),
        imbalance=imbalance(rank_load),
        hot_rank=hot,
        hot_experts=tuple(int(local) + hot * spec.experts_per_rank for local in order),
        movable=float(per_rank[hot][order].sum()) / total,
        excess=float(rank_load[hot]) / total - 1 / spec.num_ranks,
    )


def load_ids(path: str | Path, texts: Sequence[str]) -> Tensor:
    """Token ids (N, T) of N texts of equal length, by the tokenizer stored in ``path``."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return torch.tensor([tokenizer.encode(text) for text in texts])


def expert_loads(model: Any, ids: Tensor, spec: ModelSpec) -> dict[int, IntArray]:
    """Assignments per expert (E,) of each MoE layer, by decoder layer index, for ``ids`` (N, T)."""
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
    return loads
