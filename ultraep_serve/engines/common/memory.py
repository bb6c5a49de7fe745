"""Whether a CPU's memory holds what experts need for the engine's largest batch."""

import sys

import numpy as np

from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.balance.collectives import HostAllGather
from ultraep_serve.engines.common.cpu_experts import most_tokens
from ultraep_serve.errors import ConfigError
from ultraep_serve.proof.answers import Answers
from ultraep_serve.system.machine import available_memory
from ultraep_serve.types import TokenView

__all__ = ["require_memory"]


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
    left -= cache_bytes
    if group := setup.engine_group:  # also of hosts that cannot tell
        ranks = HostAllGather(group.on_host, setup.connect_seconds)
        left = int(ranks.gather(np.array([left])).min())
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
