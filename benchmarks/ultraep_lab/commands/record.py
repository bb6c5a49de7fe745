"""`ultraep-serve record`: a trace of what a running server's router chooses."""

import argparse
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ultraep_lab.arguments import ServerFlags, control_token, counted, prepare_outputs
from ultraep_lab.bench.sidecar import CaptureSidecar
from ultraep_lab.captured import assemble
from ultraep_lab.endings import undone
from ultraep_lab.store import save_trace
from ultraep_lab.trace import DECODE, LoadTrace, Trace
from ultraep_serve.errors import BenchError
from ultraep_serve.system.settings import Seconds

__all__ = ["add_arguments", "run"]

MIB = 1 << 20
POLL_SECONDS = 0.2


Files = Annotated[
    tuple[Path, ...], Field(json_schema_extra={"metavar": "FILE", "nargs": "+"})
]  # given one after the other


class CaptureFlags(ServerFlags):
    """Where, what and how long to record."""

    from_vllm: Files = Field(
        default=(),
        description="no server is asked: read vLLM's answers under --enable-return-routed-experts "
        "from JSON files",
    )
    from_sglang: Files = Field(
        default=(),
        description="no server is asked: read what SGLang's expert distribution recorder dumped",
    )
    experts: int | None = Field(
        default=None, ge=1, description="experts of the model, with --from-vllm"
    )
    out: Path = Field(description="write the trace to FILE: .npz, or with --level loads .parquet")
    level: Literal["tokens", "loads"] = Field(
        default="tokens", description="record the experts of every token, or only their counts"
    )
    batches: int | None = Field(
        default=None, ge=1, description="end after N batches, decode included"
    )
    seconds: Seconds | None = Field(default=None, description="end after X seconds")
    max_mib: int = Field(
        default=256,
        ge=1,
        le=4096,  # what `replay` reads
        description="shared memory of the server to use, over all ranks",
    )

    @model_validator(mode="after")
    def _one_source(self) -> "CaptureFlags":
        if self.from_vllm and self.from_sglang:
            raise ValueError("--from-vllm and --from-sglang exclude each other: give one of them")
        return self

    @model_validator(mode="after")
    def _suffix_fits(self) -> "CaptureFlags":
        suffixes = (".npz", ".parquet") if self.level == "loads" else (".npz",)
        if self.out.suffix not in suffixes:
            ends = " or ".join(suffixes)
            raise ValueError(f"--out {self.out} with --level {self.level} must end in {ends}")
        return self


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``CaptureFlags``."""
    parser.description = (
        "Record which experts the tokens of a running server choose, under whatever policy is in "
        "force, for `replay` and `advise`. Ends after --batches or --seconds, at Ctrl-C, at "
        "SIGTERM, or when --max-mib is full; what was recorded until then is written. With "
        "--from-vllm or --from-sglang, turn into a trace what an engine recorded by itself."
    )
    CaptureFlags.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Record, write the trace, say what it holds. Raises UltraEPError with what to do."""
    flags = CaptureFlags.from_flags(arguments)
    prepare_outputs(flags.out)
    if flags.from_vllm or flags.from_sglang:
        trace = _read(flags)
        save_trace(flags.out, trace)
    else:
        trace = _record(flags)
    print(f"{flags.out}: {_summary(trace)}")
    return 0


def _read(flags: CaptureFlags) -> Trace | LoadTrace:
    from ultraep_lab.engine_recordings import from_sglang, from_vllm

    if flags.from_vllm:
        return from_vllm(flags.from_vllm, flags.experts)
    return from_sglang(flags.from_sglang, flags.experts)


def _record(flags: CaptureFlags) -> Trace | LoadTrace:
    with closing(CaptureSidecar(flags.sidecar, control_token(flags))) as sidecar:
        with undone(sidecar.stop, "a server that does not record"):
            capture = sidecar.start(flags.level, flags.max_mib * MIB)
            try:
                _wait(sidecar, capture, flags.batches, flags.seconds)
            except KeyboardInterrupt:
                print("interrupted; writing what was recorded")
        trace = assemble(sidecar.spools(capture), flags.batches)
        save_trace(flags.out, trace)
        sidecar.forget()
    return trace


def _wait(
    sidecar: CaptureSidecar, capture: int, batches: int | None, seconds: float | None
) -> None:
    """Return when there are enough batches, time is up or a spool is full."""
    deadline = None if seconds is None else time.monotonic() + seconds
    began = False
    while deadline is None or time.monotonic() < deadline:
        progress = sidecar.progress(capture)
        if began and not progress.ranks:
            raise BenchError("the recording was deleted on the server meanwhile; record again")
        began = bool(progress.ranks)
        if progress.lost_batches:
            print("--max-mib is full")
            return
        if batches is not None and progress.batches >= batches:
            return
        left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
        time.sleep(max(0.0, min(POLL_SECONDS, left)))


def _summary(trace: Trace | LoadTrace) -> str:
    about = trace.metadata
    decode = "" if trace.phase is None else f", {int((trace.phase == DECODE).sum())} of them decode"
    lost = about.get("lost_batches")
    missing = f"; {lost} later ones did not fit" if lost else ""
    if isinstance(trace, LoadTrace):
        held = f"{counted(trace.num_batches, 'batch', 'batches')}{decode}"
    else:
        held = f"{trace.num_tokens} tokens{decode}, in "
        parts = ("batch", "batches") if "batches" in about else ("sequence", "sequences")
        held += counted(trace.sequence_lengths.size, *parts)
    return f"{held}, {trace.num_layers} MoE layers{missing}"
