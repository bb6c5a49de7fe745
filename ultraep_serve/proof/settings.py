"""Whether any batch can be balanced with what was set and measured."""

from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.costs.model import CostModel, Transfer, saved_picoseconds


def why_never_balanced(setup: GroupSetup, costs: CostModel, largest_batch: int | None) -> str:
    """What keeps every layer at home, whatever its load, and what to do; empty: nothing does.

    ``largest_batch`` in assignments over all ranks; None: the engine sets no bound.
    """
    config, shape, domain_size = setup.config, setup.shape, setup.location.domain_size
    if domain_size == 1:
        return (
            "every domain has one rank, so there is nowhere to copy experts to; start more "
            "ranks by one ultraep-serve, or choose a larger --domain-size"
        )
    if not shape.num_replica_slots:
        return "without replica slots there is no room for copies; choose --slots 1 or more"
    if setup.speeds is not None:
        worst = setup.speeds.sum() / setup.speeds.min()  # all assignments on the slowest rank
        if config.max_imbalance >= worst:
            return (
                f"no load is more uneven than {worst:.3g}, and up to --max-imbalance "
                f"{config.max_imbalance:g} all are left alone; choose less"
            )
    if largest_batch is None:
        return ""
    loads, one_expert = (largest_batch, -(-largest_batch // domain_size)), Transfer(1, 1)
    if saved_picoseconds(*loads, shape, one_expert, costs.integer_costs()) > 0:
        return ""
    return (
        "by the costs that were measured or given, copying one expert takes longer than it "
        f"could save in the largest batch, of {largest_batch} assignments; let the engine "
        "schedule more tokens at once"
    )
