"""`ultraep-serve make-trace`: a synthetic routing trace with known properties."""

import argparse
from pathlib import Path

from pydantic import Field

from ultraep_lab.arguments import prepare_outputs
from ultraep_lab.store import save_trace
from ultraep_lab.trace import LoadTrace
from ultraep_lab.workload_options import WorkloadOptions
from ultraep_lab.workloads import Workload, drawn_loads, make_trace
from ultraep_serve.errors import ConfigError
from ultraep_serve.system.files import read_object
from ultraep_serve.system.settings import Settings


class TraceFile(Settings):
    """What `make-trace` takes beside ``WorkloadOptions``."""

    loads: Path | None = Field(
        default=None,
        description="draw batches of --period tokens from these totals instead: a JSON object, by "
        "layer the assignments of every expert",
    )
    out: Path = Field(description="write the trace to FILE (.npz)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``WorkloadOptions`` and ``TraceFile``."""
    parser.description = (
        "Write a routing trace with a given expected imbalance, experts placed in order. switch: "
        "two workloads take turns. burst: short periods of sharp skew. rotate: the hot spot moves "
        "from rank to rank."
    )
    WorkloadOptions.add_flags(parser)
    TraceFile.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Make the trace and write it. Raises UltraEPError with what to do."""
    workload = WorkloadOptions.from_flags(arguments).workload()
    files = TraceFile.from_flags(arguments)
    path = files.out
    if path.suffix != ".npz":
        raise ConfigError(f"--out {path} must end in .npz")
    prepare_outputs(path)
    if files.loads is not None:
        counted = _drawn(files.loads, workload)
        save_trace(path, counted)
        print(f"{path}: {counted.num_batches} batches, {counted.num_layers} layers")
        return 0
    trace = make_trace(workload)
    save_trace(path, trace)
    print(
        f"{path}: {trace.num_tokens} tokens, {trace.num_layers} layers, "
        f"{trace.num_experts} experts, top-{workload.top_k}, {workload.kind}, "
        f"imbalance {workload.imbalance} at EP{workload.num_ranks}, seed {workload.seed}"
        + (f", last rank at speed {workload.straggler}" if workload.straggler < 1 else "")
    )
    return 0


def _drawn(path: Path, workload: Workload) -> LoadTrace:
    return drawn_loads(
        read_object(path, "totals"),
        workload.num_ranks,
        workload.period * workload.top_k // workload.num_ranks,
        max(1, workload.num_tokens // workload.period),
        workload.seed,
    )
