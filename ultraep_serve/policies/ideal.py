"""Policy ``ideal``: assignments dealt to the ranks in turn, as if every rank held every expert.

No placement does this with the right weights: it is the force-balanced routing that balancers are
measured against (arXiv 2606.04101), with no replicas and no regard to where tokens are.
"""

import numpy as np

from ultraep_serve.policies._split import even_shares
from ultraep_serve.policies.placement import Counts, Placement, master_copies
from ultraep_serve.types import ExpertShape, IntArray

__all__ = ["place_ideal", "split_ideal"]


def place_ideal(loads: Counts, shape: ExpertShape, history: Counts, domain_size: int) -> Placement:
    """Arguments as ``PolicyFunction``; only ``loads`` matters."""
    quota = _deal(loads).sum(0, dtype=np.int32)
    return Placement(quota, master_copies(shape), None)


def split_ideal(loads: Counts, placement: Placement) -> IntArray:
    """Shares (R, E, R): the assignments in order, one rank after the other."""
    return _deal(loads)


def _deal(loads: Counts) -> IntArray:
    return even_shares(loads, np.ones(loads.shape[::-1], np.int32))
