"""`ultraep-serve record`: a trace of what a running server's router chooses."""

import argparse
import signal
import time
from contextlib import closing
from pathlib import Path

from ultraep_serve.cli.arguments import (
    add_server_arguments,
    control_token,
    number,
    prepare_outputs,
    seconds,
)
from ultraep_serve.errors import BenchError, ConfigError
from ultraep_serve.lab.bench.sidecar import RecordingSidecar
from ultraep_serve.lab.captured import assemble
from ultraep_serve.lab.store import save_trace
from ultraep_serve.lab.trace import DECODE, LoadTrace, Trace

__all__ = ["add_arguments", "run"]

MIB = 1 << 20
MOST_MIB = 4096  # what `ultraep-serve replay` reads
POLL_SECONDS = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where, what and how long to record."""
    parser.description = (
        "Record which experts the tokens of a running server choose, under whatever policy is in "
        "force, for `replay` and `advise`. Ends after --batches or --seconds, at Ctrl-C, at "
        "SIGTERM, or when --max-mib is full; what was recorded until then is written."
    )
    add_server_arguments(parser)
    out = "write the trace to FILE: .npz, or with --level loads .parquet"
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help=out)
    parser.add_argument(
        "--level", choices=("tokens", "loads"), default="tokens",
        help="record the experts of every token, or only their counts",
    )  # fmt: skip
    batches = "end after N batches, decode included"
    parser.add_argument("--batches", type=number(1), metavar="N", help=batches)
    parser.add_argument("--seconds", type=seconds, metavar="X", help="end after X seconds")
    parser.add_argument(
        "--max-mib", type=number(1, MOST_MIB), metavar="N", default=256,
        help="shared memory of the server to use, over all ranks",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Record, write the trace, say what it holds. Raises UltraEPError with what to do.

    SIGTERM is as Ctrl-C: the server must not go on recording.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _check(arguments)
    prepare_outputs(arguments.out)
    with closing(RecordingSidecar(arguments.sidecar, control_token(arguments))) as sidecar:
        recording = sidecar.start(arguments.level, arguments.max_mib * MIB)
        try:
            _wait(sidecar, recording, arguments.batches, arguments.seconds)
        except KeyboardInterrupt:
            print("interrupted; writing what was recorded")
        finally:
            sidecar.stop()
        trace = assemble(sidecar.spools(recording), arguments.batches)
        save_trace(arguments.out, trace)
        sidecar.forget()
    print(f"{arguments.out}: {_summary(trace)}")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    suffixes = (".npz", ".parquet") if arguments.level == "loads" else (".npz",)
    if arguments.out.suffix not in suffixes:
        raise ConfigError(
            f"--out {arguments.out} with --level {arguments.level} must end in "
            f"{' or '.join(suffixes)}"
        )


def _wait(
    sidecar: RecordingSidecar, recording: int, batches: int | None, seconds: float | None
) -> None:
    """Return when there are enough batches, time is up or a spool is full."""
    deadline = None if seconds is None else time.monotonic() + seconds
    began = False
    while deadline is None or time.monotonic() < deadline:
        progress = sidecar.progress(recording)
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
    assert trace.phase is not None
    decode = int((trace.phase == DECODE).sum())
    about = trace.metadata
    if isinstance(trace, Trace):
        held = f"{trace.num_tokens} tokens, {decode} of them decode, in {about['batches']} batches"
    else:
        held = f"{about['batches']} batches, {decode} of them decode"
    lost = f"; {about['lost_batches']} later ones did not fit" if about["lost_batches"] else ""
    return f"{held}, {trace.num_layers} MoE layers{lost}"
