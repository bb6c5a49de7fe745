"""What benchmarks/results/README.md has from the JSON of benchmarks.

    python -m docs.generate.measurements     # brings it up to date

A table stands between ``<!-- NAME -->`` and ``<!-- end -->``, NAME being its JSON's.
"""

from ultraep_kernels.contract import FULL_SPEED

from docs.generate.figures import (
    RESULTS,
    TRAFFIC,
    estimate,
    percent,
    read_document,
    read_rows,
    rounds,
)
from docs.generate.reference import table, with_table

__all__ = ["PAGE", "TIMES", "measurements"]

PAGE = RESULTS / "README.md"
TIMES = (
    *("serving-ttft", "serving-balanced", "sglang-ttft", "sglang-balanced"),
    *("real-routing-ttft", "real-routing-ttft-sglang"),
)
SPEEDS, REFRESH = "speeds", "refresh"
_POLICIES = ("off", "quota", "ideal")


def measurements(text: str) -> str:
    """benchmarks/results/README.md with its tables: times, speeds, and plans that are kept."""
    for name in TIMES:
        text = with_table(text, name, times(name))
    text = with_table(text, REFRESH, _kept_plans())
    return with_table(text, SPEEDS, _by_time())


def times(name: str) -> str:
    """Median times under every policy that was measured, and how much faster ``quota`` is."""
    rows = read_rows(name)
    traffic = "workload" in rows[0]
    policies = [policy for policy in _POLICIES if policy in rows[0]["ttft_seconds"]]
    others = [policy for policy in policies if policy != "quota"]
    faster = (f"quota is faster than {policy} by" for policy in others)
    return table(
        (*(("traffic",) if traffic else ()), "prompt tokens", *policies, *faster),
        (
            (
                *((TRAFFIC[row["workload"]],) if traffic else ()),
                str(row["prompt_tokens"]),
                *(f"{row['ttft_seconds'][policy]:.2f} s" for policy in policies),
                *(percent(*estimate(rounds(row, policy))) for policy in others),
            )
            for row in rows
        ),
    )


def _by_time() -> str:
    """Both cores free, and one of them half busy."""
    found = read_document(SPEEDS)
    head = (
        "cores", "prompt tokens", "by count", "by time", "by time is faster by",
        "speeds that plans by time had",
    )  # fmt: skip
    rows = []
    for cores, phase in (("free", "free"), ("one half busy", "busy")):
        for row in found[phase]:
            unequal = row["median_speeds_where_unequal"]
            speeds = [speed / FULL_SPEED for speed in unequal or ()]
            ratio = row["by_count_over_by_time"]
            rows.append(
                (
                    cores,
                    str(row["prompt_tokens"]),
                    f"{row['by_count_seconds']['median']:.2f} s",
                    f"{row['by_time_seconds']['median']:.2f} s",
                    percent(ratio["median"], *ratio["interval"]),
                    ", ".join(f"{speed:.2f}" for speed in speeds) or "equal",
                )
            )
    return table(head, rows)


def _kept_plans() -> str:
    """A row for each policy and interval, a column for each kind of traffic."""
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for row in read_document(REFRESH)["policies"]:
        shown = f"{row['imbalance']:.3f}, {1e3 * row['layer_seconds']:.2f} ms"
        cells.setdefault((row["policy"], row["interval"]), {})[row["traffic"]] = shown
    kinds = list(next(iter(cells.values())))
    rows = (
        (f"`{policy}`", str(every) if every else "-", *(found[kind] for kind in kinds))
        for (policy, every), found in cells.items()
    )
    return table(("policy", "batches between plans", *kinds), rows)


def main() -> None:
    """Write it."""
    PAGE.write_text(measurements(PAGE.read_text()))


if __name__ == "__main__":
    main()
