"""Instructions of the longest warp of plans, executed from their PTX (docs/dev/ptx.md).

    python benchmarks/plan_lengths.py

Zipf loads, of two batches that are alike; the second finds copies where they stay.
"""

import harness

from tests.emulated_gpu.kernels.lengths import longest_warps
from tests.support.ids import zipf_loads
from ultraep_serve.types import ExpertShape

SIZES = ((8, 128, 0.6), (16, 128, 0.6), (64, 256, 0.9))  # ranks, experts, Zipf's exponent


def main() -> None:
    """Execute, print and write."""
    args = harness.parser(__doc__, "plan-lengths.json").parse_args()
    rows = []
    for ranks, experts, exponent in SIZES:
        shape = ExpertShape(ranks, experts, 2)
        loads = zipf_loads(shape, exponent, 2, assignments=65536)
        fresh, staying = (longest_warps(loads, 2, keeps=keeps) for keeps in (False, True))
        named = {"ranks": ranks, "experts": experts, "exponent": exponent}
        rows.append({**named, "fresh": fresh, "staying": staying})
        print(rows[-1], flush=True)
    harness.write(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
