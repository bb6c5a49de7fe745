"""plan: how long the quota planner searches; CPU and device search alike, so they find one plan."""

from typing import NamedTuple

__all__ = ["Search", "search_of"]

_GRAIN = 512
_FIRST_WORK = 1 << 13  # visits spent on few replicas where the load can be balanced
_WORK = 1 << 15  # visits spent in all where it cannot
_RELAX_SWEEPS = 8


class Search(NamedTuple):
    """Limits of the search in one domain."""

    grain: int  # loads that differ by less than 1/grain of the mean count as equal
    first: int  # attempts of the first wave, all of them at the goal
    limit: int  # attempts of both waves
    sweeps: int  # over all slots, where an attempt ends unbalanced


def search_of(domain_size: int, num_masters: int) -> Search:
    """Limits for domains of ``domain_size`` ranks with ``num_masters`` experts each.

    An attempt visits every rank and every expert of one rank once per copy.
    """
    visits = max(1, domain_size * (domain_size + num_masters))
    first = min(max(_FIRST_WORK // visits, 4), 16)
    limit = min(max(_WORK // visits, 8), 64)
    return Search(_GRAIN, first, limit, _RELAX_SWEEPS)
