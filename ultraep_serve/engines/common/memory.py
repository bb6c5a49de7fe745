"""What there is memory for: slots of each layer's own, and a CPU's largest batch of the engine."""

import sys
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.balance.collectives import all_gather_rows
from ultraep_serve.config import MOST_SLOT_PERCENT
from ultraep_serve.engines.common.cpu_experts import most_tokens
from ultraep_serve.errors import ConfigError
from ultraep_serve.proof.answers import Answers
from ultraep_serve.system.machine import available_memory, total_memory
from ultraep_serve.types import TokenView


def chosen_slot_memory(
    setup: GroupSetup, layers: Sequence[Sequence[torch.Tensor]]
) -> Literal["per_layer", "shared"]:
    """Where slots of ``layers``, each its masters' tensors (L, ...), are; on all ranks the same.

    That is what the setting says. Left to itself: each layer's own, where copies stay in them and
    every rank of the group has the memory.
    """
    wanted, shape, device = setup.config.slot_memory, setup.shape, layers[0][0].device
    if wanted != "auto":
        return wanted
    if not shape.num_slots:
        return "shared"
    masters = sum(tensor.nbytes for tensors in layers for tensor in tensors)
    slot_bytes = masters // shape.num_masters * shape.num_slots
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[1]
    else:
        memory = total_memory() // setup.location.host_size
    fits = _least(setup, memory * MOST_SLOT_PERCENT // 100 - slot_bytes) >= 0
    return "per_layer" if fits else "shared"


def require_memory(setup: GroupSetup, answers: Answers, largest: int, cache_bytes: int) -> None:
    """Raise ConfigError, on all ranks, where CPUs lack memory to compute the largest batch.

    ``largest`` in assignments over all ranks; ``cache_bytes`` are what the engine has yet to take
    for keys and values. Counted is what experts need at least, beside all that is there by now. On
    GPUs engines try their largest at start.
    """
    if answers.device.type != "cpu":
        return
    free = available_memory()
    left = sys.maxsize if free is None else free // setup.location.host_size
    left = _least(setup, left - cache_bytes)  # also of hosts that cannot tell
    top_k, hidden = answers.experts_per_token, answers.hidden_size
    sources = setup.shape.num_ranks if setup.view is TokenView.OWN else 1
    tokens = largest // top_k // sources
    most = most_tokens(left, hidden, top_k, answers.dtype) // sources
    if tokens > most:
        fits = f"{most} or less" if most > 0 else "less by far, or a smaller cache"
        raise ConfigError(
            f"experts need more memory for a batch of {tokens} tokens than is left; choose "
            f"--max-num-batched-tokens (SGLang: --chunked-prefill-size) {fits}"
        )


def _least(setup: GroupSetup, own: int) -> int:
    """The least of all ranks' numbers; all of them together."""
    if (group := setup.engine_group) is None:
        return own
    return int(all_gather_rows(group.on_host, np.array([own]), setup.connect_seconds).min())
