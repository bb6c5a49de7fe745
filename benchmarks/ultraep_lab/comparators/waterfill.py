"""Waterfill: the shared expert of each token is computed on a rank that has little to do.

Source: ``waterfill.py`` and ``deepep_waterfill_kernels.py`` of SGLang (``--enable-waterfill``), its
default, the static mode. Routed experts are not touched. A source rank counts where its own tokens'
routed assignments go, and sends the shared expert's part of a token to any rank, with chances
that are proportional to what that rank lacks of the mean, its own rank a tenth more.
Here each rank gets its expected number, rounded. Fewer than 64 tokens stay at home.

A shared expert is no part of a routing trace, so this is no policy of a replay: where it is
compared, the shared expert counts under the others too, each token's at home.
"""

import numpy as np

from ultraep_lab.comparators.placement import Counts

__all__ = ["waterfill"]

FEWEST_TOKENS = 64
HOME_PREFERENCE = 11, 10


def waterfill(routed: Counts, tokens: Counts) -> Counts:
    """Shared-expert assignments int64 (R_source, R_target).

    Args:
        routed: (R_source, R_target), where the routed assignments of each rank's tokens go.
        tokens: (R,), each rank's own.
    """
    num_ranks = tokens.size
    shared = np.diag(tokens).astype(np.int64)
    more, less = HOME_PREFERENCE
    for source in np.flatnonzero(tokens >= FEWEST_TOKENS):
        load = routed[source]
        top_k = max(1, load.sum() // tokens[source])
        target = -(-(load.sum() + load.sum() // top_k) // num_ranks)
        chances = np.maximum(target - load, 0) * less // more
        chances[source] = max(target - load[source], 0)
        if chances.sum():
            reached = chances.cumsum() * tokens[source] // chances.sum()
            shared[source] = np.diff(reached, prepend=0)
    return shared
