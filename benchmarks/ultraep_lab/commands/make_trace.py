"""`ultraep-serve make-trace`: a synthetic routing trace with known properties."""

import argparse
from pathlib import Path

from pydantic import Field, model_validator

from ultraep_lab.arguments import prepare_outputs
from ultraep_lab.store import save_trace
from ultraep_lab.trace import LoadTrace
from ultraep_lab.workloads import Kind, Workload, drawn_loads, make_trace
from ultraep_serve.errors import ConfigError
from ultraep_serve.system.files import read_object
from ultraep_serve.system.settings import Settings

__all__ = ["WorkloadFlags", "add_arguments", "run"]


class WorkloadFlags(Settings):
    """A ``Workload``, checked."""

    kind: Kind = Field(default="zipf", description="kind of workload")
    num_experts: int = Field(
        default=128, validation_alias="experts", ge=1, le=1 << 15, description="experts per layer"
    )
    top_k: int = Field(default=8, ge=1, description="experts per token")
    num_layers: int = Field(default=8, validation_alias="layers", ge=1, description="MoE layers")
    num_tokens: int = Field(
        default=16384, validation_alias="tokens", ge=1, description="tokens in all"
    )
    num_ranks: int = Field(
        default=8, validation_alias="ep", ge=1, description="ranks that the imbalance is meant for"
    )
    period: int = Field(default=4096, ge=1, description="tokens between changes")
    seed: int = Field(default=0, ge=0, description="seed of the random draws")
    imbalance: float = Field(default=2.0, ge=1, description="expected max/mean over ranks")
    straggler: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="speed of the last rank, others have 1; replay plans for it",
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> "WorkloadFlags":
        if self.top_k > self.num_experts:
            raise ValueError(f"--top-k = {self.top_k} must be 1 to --experts")
        if self.num_experts % self.num_ranks:
            raise ValueError(f"--experts = {self.num_experts} must be a multiple of --ep")
        return self

    def workload(self) -> Workload:
        """The same for ``make_trace``."""
        return Workload(**self.model_dump())


class TraceFile(Settings):
    """What `make-trace` takes beside ``WorkloadFlags``."""

    loads: Path | None = Field(
        default=None,
        description="draw batches of --period tokens from these totals instead: a JSON object, by "
        "layer the assignments of every expert",
    )
    out: Path = Field(description="write the trace to FILE (.npz)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``WorkloadFlags`` and ``TraceFile``."""
    parser.description = (
        "Write a routing trace with a given expected imbalance, experts placed in order. switch: "
        "two workloads take turns. burst: short periods of sharp skew. rotate: the hot spot moves "
        "from rank to rank."
    )
    WorkloadFlags.add_flags(parser)
    TraceFile.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Make the trace and write it. Raises UltraEPError with what to do."""
    workload = WorkloadFlags.from_flags(arguments).workload()
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
