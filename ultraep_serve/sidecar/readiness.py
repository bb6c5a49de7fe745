"""What keeps a rank from being ready."""

from ultraep_serve.observability import RankView, RingState

__all__ = ["problem"]


def problem(view: RankView, num_ranks: int, unreadable: str) -> str:
    """What is wrong with the rank that ``view`` shows, in a run of ``num_ranks``; else empty.

    ``unreadable`` says why there is no header, where there is none.
    """
    if view.header is None:
        return unreadable
    if view.header.shape.num_ranks != num_ranks:
        return f"its ring belongs to a run of {view.header.shape.num_ranks} ranks"
    if view.header.state != RingState.READY:
        return f"state is {view.header.state.name.lower()}"
    if view.header.dead:
        return f"process {view.header.pid} has died"
    if not view.alive:
        return f"no heartbeat for {view.heartbeat_age_seconds:.1f} s"
    return ""
