"""`ultraep-serve make-trace`: a synthetic routing trace with known properties."""

import argparse
from pathlib import Path

from pydantic import Field

from ultraep_serve.cli.arguments import prepare_outputs
from ultraep_serve.errors import ConfigError
from ultraep_serve.lab.store import save_trace
from ultraep_serve.lab.workloads import Workload, make_trace
from ultraep_serve.system.settings import Settings

__all__ = ["add_arguments", "run"]


class TraceFile(Settings):
    """What `make-trace` takes beside ``Workload``."""

    out: Path = Field(description="write the trace to FILE (.npz)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``Workload`` and ``TraceFile``."""
    parser.description = (
        "Write a routing trace with a given expected imbalance, experts placed in order. switch: "
        "two workloads take turns. burst: short periods of sharp skew. rotate: the hot spot moves "
        "from rank to rank."
    )
    Workload.add_flags(parser)
    TraceFile.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Make the trace and write it. Raises UltraEPError with what to do."""
    workload, path = Workload.from_flags(arguments), TraceFile.from_flags(arguments).out
    if path.suffix != ".npz":
        raise ConfigError(f"--out {path} must end in .npz")
    prepare_outputs(path)
    trace = make_trace(workload)
    save_trace(path, trace)
    print(
        f"{path}: {trace.num_tokens} tokens, {trace.num_layers} layers, "
        f"{trace.num_experts} experts, top-{workload.top_k}, {workload.kind}, "
        f"imbalance {workload.imbalance} at EP{workload.num_ranks}, seed {workload.seed}"
        + (f", last rank at speed {workload.straggler}" if workload.straggler < 1 else "")
    )
    return 0
