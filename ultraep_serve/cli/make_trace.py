"""`ultraep-serve make-trace`: a routing trace with a known basis."""

import argparse
from pathlib import Path
from typing import Any

from ultraep_serve.cli.arguments import DEFAULT

__all__ = ["add_parser", "run"]

KINDS = ("zipf", "lognormal", "switch", "burst", "rotate")  # traces.KINDS, slow to import


def add_parser(subparsers: Any) -> None:
    """Add `make-trace` to the main parser's ``subparsers``."""
    parser = subparsers.add_parser(
        "make-trace",
        help="write a synthetic routing trace",
        description="Write a routing trace whose expected imbalance, with experts placed in order, "
        "is the one asked for. switch: two workloads take turns. burst: short sharp skew. "
        "rotate: the hot spot moves from rank to rank.",
    )
    parser.add_argument("--kind", choices=KINDS, default="zipf", help=f"workload ({DEFAULT})")
    parser.add_argument("--experts", type=int, default=128, help=f"per layer ({DEFAULT})")
    parser.add_argument("--top-k", type=int, default=8, help=f"experts per token ({DEFAULT})")
    parser.add_argument("--layers", type=int, default=8, help=f"MoE layers ({DEFAULT})")
    parser.add_argument("--tokens", type=int, default=16384, help=f"in all ({DEFAULT})")
    parser.add_argument(
        "--ep", type=int, default=8, help=f"ranks that the imbalance is meant for ({DEFAULT})"
    )
    parser.add_argument(
        "--imbalance", type=float, default=2.0, help=f"wanted max/mean over ranks ({DEFAULT})"
    )
    parser.add_argument(
        "--period", type=int, default=4096, help=f"tokens between changes ({DEFAULT})"
    )
    parser.add_argument("--seed", type=int, default=0, help=DEFAULT)
    parser.add_argument("--out", type=Path, required=True, help=".npz file to write")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make the trace and write it. Raises UltraEPError with what to do."""
    from ultraep_serve.errors import TraceError
    from ultraep_serve.files import prepare_output
    from ultraep_serve.offline.store import save_trace
    from ultraep_serve.offline.workloads import Workload, make_trace

    if arguments.out.suffix != ".npz":
        raise TraceError(f"--out {arguments.out} must end in .npz")
    prepare_output(arguments.out)
    workload = Workload(
        kind=arguments.kind,
        num_tokens=arguments.tokens,
        num_layers=arguments.layers,
        num_experts=arguments.experts,
        top_k=arguments.top_k,
        num_ranks=arguments.ep,
        imbalance=arguments.imbalance,
        period=arguments.period,
        seed=arguments.seed,
    )
    trace = make_trace(workload)
    save_trace(arguments.out, trace)
    print(
        f"{arguments.out}: {trace.num_tokens} tokens, {trace.num_layers} layers, "
        f"{trace.num_experts} experts, top-{workload.top_k}, {workload.kind}, "
        f"imbalance {workload.imbalance} at EP{workload.num_ranks}, seed {workload.seed}"
    )
    return 0
