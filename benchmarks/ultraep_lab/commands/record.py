"""`ultraep-serve record`: a trace of the loads of a running server."""

import argparse
import contextlib
import signal
import time
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from ultraep_lab.arguments import counted, prepare_outputs
from ultraep_lab.recorded_loads import LoadRecording
from ultraep_lab.store import save_trace
from ultraep_lab.trace import DECODE, LoadTrace, Trace
from ultraep_lab.words import Seconds
from ultraep_serve.errors import RingError
from ultraep_serve.system.settings import Settings
from ultraep_serve.telemetry.run_directory import find_run

POLL_SECONDS = 0.2


Files = Annotated[
    tuple[Path, ...], Field(json_schema_extra={"metavar": "FILE", "nargs": "+"})
]  # given one after the other


class RecordFlags(Settings):
    """Where, what and how long to record."""

    port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="the server that ultraep-serve started on this port",
    )
    run_dir: Path | None = Field(
        default=None,
        description="the server with this run directory",
        json_schema_extra={"metavar": "DIR"},
    )
    from_vllm: Files = Field(
        default=(),
        description="no server is read: take vLLM's answers under --enable-return-routed-experts "
        "from JSON files",
    )
    from_sglang: Files = Field(
        default=(),
        description="no server is read: take what SGLang's expert distribution recorder dumped",
    )
    experts: int | None = Field(
        default=None, ge=1, description="experts of the model, with --from-vllm"
    )
    out: Path = Field(description="write the trace to FILE (.npz)")
    batches: int | None = Field(default=None, ge=1, description="end after N prefill batches")
    seconds: Seconds | None = Field(
        default=None, description="end after X seconds", json_schema_extra={"metavar": "SECONDS"}
    )

    @model_validator(mode="after")
    def _one_source(self) -> "RecordFlags":
        given = (self.from_vllm, self.from_sglang, self.port, self.run_dir)
        if sum(map(bool, given)) > 1:
            raise ValueError(
                "--from-vllm, --from-sglang, --port and --run-dir exclude each other: give one"
            )
        return self

    @model_validator(mode="after")
    def _suffix_fits(self) -> "RecordFlags":
        if self.out.suffix != ".npz":
            raise ValueError(f"--out {self.out} must end in .npz")
        return self


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``RecordFlags``."""
    parser.description = (
        "Record how many tokens of each rank choose each expert, in every layer of the prefill "
        "batches of a running server on this machine, for `replay`. Ends after "
        "--batches or --seconds, at Ctrl-C or at SIGTERM; what was recorded until then is written. "
        "With --from-vllm or --from-sglang, turn into a trace what an engine recorded by itself."
    )
    RecordFlags.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Record, write the trace, say what it holds. Raises UltraEPError with what to do."""
    flags = RecordFlags.from_flags(arguments)
    prepare_outputs(flags.out)
    trace = _read(flags) if flags.from_vllm or flags.from_sglang else _record(flags)
    save_trace(flags.out, trace)
    print(f"{flags.out}: {_summary(trace)}")
    return 0


def _read(flags: RecordFlags) -> Trace | LoadTrace:
    from ultraep_lab.engine_recordings import from_sglang, from_vllm

    if flags.from_vllm:
        return from_vllm(flags.from_vllm, flags.experts)
    return from_sglang(flags.from_sglang, flags.experts)


def _record(flags: RecordFlags) -> LoadTrace:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.closing(LoadRecording(find_run(flags.run_dir, flags.port))) as recording:
        try:
            _wait(recording, flags.batches, flags.seconds)
        except KeyboardInterrupt:
            print("interrupted; writing what was recorded")
        except RingError as error:
            print(f"{error}; writing what was recorded")
        return recording.trace(flags.batches)


def _wait(recording: LoadRecording, batches: int | None, seconds: float | None) -> None:
    """Return when there are enough batches, time is up or no trace may have more."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while batches is None or recording.num_batches < batches:
        if recording.is_full:
            print("a trace may not have more")
            return
        left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(POLL_SECONDS, left))
        recording.poll()


def _summary(trace: Trace | LoadTrace) -> str:
    about = trace.metadata
    decode = "" if trace.phase is None else f", {int((trace.phase == DECODE).sum())} of them decode"
    missed = about.get("missed_records")
    missing = f"; {counted(missed, 'record', 'records')} of layers missed" if missed else ""
    if isinstance(trace, LoadTrace):
        held = f"{counted(trace.num_batches, 'batch', 'batches')}{decode}"
    else:
        held = f"{trace.num_tokens} tokens{decode}, in "
        parts = ("batch", "batches") if "batches" in about else ("sequence", "sequences")
        held += counted(trace.sequence_lengths.size, *parts)
    return f"{held}, {trace.num_layers} MoE layers{missing}"
