"""`ultraep-serve record`: a trace of what a running server's router chooses."""

import argparse
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultraep_serve.cli.arguments import (
    DEFAULT,
    add_token_arguments,
    control_token,
    require_packages,
)
from ultraep_serve.errors import ConfigError

if TYPE_CHECKING:
    from ultraep_serve.client.sidecar import RecordingSidecar
    from ultraep_serve.offline.trace import LoadTrace, Trace

__all__ = ["add_parser", "run"]

MIB = 1 << 20
MOST_MIB = 4096  # what `ultraep-serve replay` reads
POLL_SECONDS = 0.2


def add_parser(subparsers: Any) -> None:
    """Add `record` to the main parser's ``subparsers``."""
    parser = subparsers.add_parser(
        "record",
        help="record a trace of a running server's routing",
        description="Record which experts the tokens of a running server choose, under whatever "
        "policy is in force, for `replay` and `advise`. Ends after --batches or --seconds, at "
        "Ctrl-C, or when --max-mib is full; what was recorded until then is written.",
    )
    parser.add_argument(
        "--sidecar", default="http://127.0.0.1:8001", help=f"the sidecar ({DEFAULT})"
    )
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help=f"the engine's server, whose token is taken if it runs here ({DEFAULT})",
    )
    add_token_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help=".npz, or for loads also .parquet")
    parser.add_argument(
        "--level", choices=("tokens", "loads"), default="tokens",
        help=f"the experts of every token, or their counts ({DEFAULT})",
    )  # fmt: skip
    parser.add_argument("--batches", type=int, help="batches at most, decode included")
    parser.add_argument("--seconds", type=float, help="how long to record at most")
    parser.add_argument(
        "--max-mib", type=int, default=256,
        help=f"of the server's shared memory, over all ranks ({DEFAULT})",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Record, write the trace, say what it holds. Raises UltraEPError with what to do."""
    require_packages("httpx", "rich")
    from ultraep_serve.client.sidecar import RecordingSidecar
    from ultraep_serve.files import prepare_output
    from ultraep_serve.offline.recorded import assemble
    from ultraep_serve.offline.store import save_trace

    _check(arguments)
    prepare_output(arguments.out)
    with closing(RecordingSidecar(arguments.sidecar, control_token(arguments))) as sidecar:
        number = sidecar.start(arguments.level, arguments.max_mib * MIB)
        try:
            _wait(sidecar, number, arguments.batches, arguments.seconds)
        except KeyboardInterrupt:
            print("interrupted; writing what was recorded")
        finally:
            sidecar.stop()
        trace = assemble(sidecar.spools(number), arguments.batches)
        save_trace(arguments.out, trace)
        sidecar.forget()
    print(f"{arguments.out}: {_summary(trace)}")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    legal = (".npz", ".parquet") if arguments.level == "loads" else (".npz",)
    if arguments.out.suffix not in legal:
        raise ConfigError(
            f"--out {arguments.out} with --level {arguments.level} must end in {' or '.join(legal)}"
        )
    if arguments.batches is not None and arguments.batches < 1:
        raise ConfigError(f"--batches = {arguments.batches} must be 1 or more")
    if arguments.seconds is not None and not arguments.seconds > 0:
        raise ConfigError(f"--seconds = {arguments.seconds} must be more than 0")
    if not 1 <= arguments.max_mib <= MOST_MIB:
        raise ConfigError(f"--max-mib = {arguments.max_mib} must be 1 to {MOST_MIB}")


def _wait(
    sidecar: "RecordingSidecar", number: int, batches: int | None, seconds: float | None
) -> None:
    """Return when there are enough batches, time is up or a spool is full."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while deadline is None or time.monotonic() < deadline:
        progress = sidecar.progress(number)
        if progress.lost_batches:
            print("--max-mib is full")
            return
        if batches is not None and progress.batches >= batches:
            return
        left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
        time.sleep(max(0.0, min(POLL_SECONDS, left)))


def _summary(trace: "Trace | LoadTrace") -> str:
    from ultraep_serve.offline.trace import DECODE, Trace

    assert trace.phase is not None
    decode = int((trace.phase == DECODE).sum())
    about = trace.metadata
    if isinstance(trace, Trace):
        kind, what = f"{trace.num_tokens} tokens, {decode} of them decode, in ", "batches"
    else:
        kind, what = "", f"batches, {decode} of them decode"
    lost = f"; {about['lost_batches']} later ones did not fit" if about["lost_batches"] else ""
    return f"{kind}{about['batches']} {what}, {trace.num_layers} MoE layers{lost}"
