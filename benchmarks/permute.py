"""The same model with its experts under other numbers."""

import json
import re
import shutil
from pathlib import Path

import torch

__all__ = ["permute_experts"]

_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
_ROUTER = re.compile(r".*\.mlp\.gate\.(weight|e_score_correction_bias)")


def permute_experts(source: Path, target: Path, seed: int) -> Path:
    """Write checkpoint ``source`` to ``target`` with every layer's experts renumbered.

    Mathematically the same model; experts live on other ranks, so sums are taken in another order.
    Groups of experts stay together. Returns ``target``.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    num_experts = config.get("n_routed_experts") or config["num_local_experts"]
    order = _order(num_experts, config.get("n_group") or 1, seed)
    number_of = {int(old): new for new, old in enumerate(order)}
    weights = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if match := _EXPERT.fullmatch(name):
            renamed = f"{match[1]}{number_of[int(match[2])]}{match[3]}"
            weights[renamed] = weight
        elif _ROUTER.fullmatch(name):
            weights[name] = weight[order].contiguous()
        else:
            weights[name] = weight
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _order(num_experts: int, num_groups: int, seed: int) -> torch.Tensor:
    """Old number of each new expert (E,): groups in another order, experts too within each."""
    generator = torch.Generator().manual_seed(seed)
    size = num_experts // num_groups
    groups = torch.randperm(num_groups, generator=generator)
    within = [torch.randperm(size, generator=generator) for _ in range(num_groups)]
    return torch.cat([group * size + inner for group, inner in zip(groups, within, strict=True)])
