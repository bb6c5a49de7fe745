"""`ultraep-serve make-trace`: a synthetic routing trace with known properties."""

import argparse
from pathlib import Path

from ultraep_serve.cli.arguments import built, prepare_outputs
from ultraep_serve.errors import TraceError
from ultraep_serve.lab.store import save_trace
from ultraep_serve.lab.workloads import KINDS, Workload, make_trace

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that are stored under the names of ``Workload``'s fields."""
    parser.description = (
        "Write a routing trace with a given expected imbalance, experts placed in order. switch: "
        "two workloads take turns. burst: short periods of sharp skew. rotate: the hot spot moves "
        "from rank to rank."
    )
    parser.add_argument("--kind", choices=KINDS, default="zipf", help="kind of workload")
    for flag, field, default, text in (
        ("--experts", "num_experts", 128, "experts per layer"),
        ("--top-k", "top_k", 8, "experts per token"),
        ("--layers", "num_layers", 8, "MoE layers"),
        ("--tokens", "num_tokens", 16384, "tokens in all"),
        ("--ep", "num_ranks", 8, "ranks that the imbalance is meant for"),
        ("--period", "period", 4096, "tokens between changes"),
        ("--seed", "seed", 0, "seed of the random draws"),
    ):
        parser.add_argument(flag, dest=field, type=int, metavar="N", default=default, help=text)
    imbalance = "expected max/mean over ranks"
    parser.add_argument("--imbalance", type=float, metavar="X", default=2.0, help=imbalance)
    straggler = "speed of the last rank, others have 1; replay plans for it (default: 1)"
    parser.add_argument("--straggler", type=float, metavar="X", default=1.0, help=straggler)
    out = "write the trace to FILE (.npz)"
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help=out)


def run(arguments: argparse.Namespace) -> int:
    """Make the trace and write it. Raises UltraEPError with what to do."""
    if arguments.out.suffix != ".npz":
        raise TraceError(f"--out {arguments.out} must end in .npz")
    prepare_outputs(arguments.out)
    workload = built(Workload, arguments)
    trace = make_trace(workload)
    save_trace(arguments.out, trace)
    print(
        f"{arguments.out}: {trace.num_tokens} tokens, {trace.num_layers} layers, "
        f"{trace.num_experts} experts, top-{workload.top_k}, {workload.kind}, "
        f"imbalance {workload.imbalance} at EP{workload.num_ranks}, seed {workload.seed}"
        + (f", last rank at speed {workload.straggler}" if workload.straggler < 1 else "")
    )
    return 0
