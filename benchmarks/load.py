"""Latency against request rate, two ranks on this machine, AIPerf as load generator.

    python benchmarks/load.py --rates 1,2,3,4 --aiperf PATH --raw DIR --plots DIR
    python benchmarks/load.py --model balanced ...       the control: nothing to balance

Texts change from one domain to another half way through every window.
The engine is the one of the environment, vLLM or SGLang. In every repeat each server is started
anew, serves all rates and is stopped before the next one starts, in an order that changes:

    without-ep               the engine alone, without expert parallelism
    off, quota, ideal        one balanced server, its policy switched between windows
    sglang-eplb              SGLang's own balancer, if --contenders names it
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import harness
from served import MODELS, WORK, model, serve, serve_without_ep
from sglang_eplb import eplb_server

from ultraep_lab.bench.aiperf import SUMMARY, AIPerf
from ultraep_lab.bench.engine import Server
from ultraep_lab.bench.load import LoadOptions, LoadRun
from ultraep_lab.bench.prefill import Servers
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.commands.bench import (
    LoadFiles,
    load_results,
    prepare_load_outputs,
)
from ultraep_lab.demo.balanced_server import BalancedServer, installed_engine
from ultraep_lab.demo.server_process import ServerProcess
from ultraep_lab.demo.text import DOMAINS, sample_text

WITHOUT_EP, EPLB = "without-ep", "sglang-eplb"
POLICIES = ("off", "quota", "ideal")
ABOUT_ITSELF = ("run_info", "input_config")


@dataclass(frozen=True)
class Contender:
    """A server that can be started, and the names under which its windows are listed."""

    names: tuple[str, ...]
    start: Callable[[], ServerProcess]


def main() -> None:
    """Measure, print a table, write JSON and picture."""
    parser = harness.parser(__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3")
    parser.add_argument("--contenders", default=f"{WITHOUT_EP},off,quota,ideal")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--timeout", type=float, default=600.0, help="for one answer, seconds")
    LoadOptions.add_flags(parser)
    LoadFiles.add_flags(parser)
    options = parser.parse_args()
    load, files = LoadOptions.from_flags(options), LoadFiles.from_flags(options)
    options.mode, options.engine = "tensor", installed_engine()
    control = "" if options.model == "qwen3" else f"-{options.model}"
    name = f"load-{options.engine}{control}.json"
    options.json = options.json or Path("benchmarks/results") / name
    prepare_load_outputs(files, options.json)
    aiperf = AIPerf(files.aiperf)
    sources = [partial(sample_text, domain) for domain in DOMAINS]
    run = LoadRun(aiperf, sources, load, options.timeout, files.raw)
    contenders = chosen(options)
    listed = [name for contender in contenders for name in contender.names]
    about = {"engine": options.engine, "model": options.model, "command": harness.command()}
    with load_results(run, listed, about, options.json, files.plots):
        for repeat in range(load.repeats):
            for contender in contenders[:: 1 if repeat % 2 else -1]:
                measure(run, contender, repeat)
    if files.raw is not None:
        write_raw(files.raw, options.json.with_stem(f"{options.json.stem}-raw"))


def write_raw(raw: Path, path: Path) -> None:
    """One file of AIPerf's own summaries, by window, without what it says of its own set-up."""
    lines = []
    for summary in sorted(raw.glob(f"*/{SUMMARY}")):
        figures = json.loads(summary.read_text())
        kept = {name: value for name, value in figures.items() if name not in ABOUT_ITSELF}
        lines.append(f"{json.dumps(summary.parent.name)}: {json.dumps(kept)}")
    path.write_text("{" + ",\n".join(lines) + "}\n")


def chosen(options: argparse.Namespace) -> list[Contender]:
    """The servers that --contenders asks for."""
    path, wanted = model(options.model), options.contenders.split(",")
    if unknown := set(wanted) - {WITHOUT_EP, EPLB, *POLICIES}:
        sys.exit(f"--contenders: {', '.join(sorted(unknown))} is unknown")
    if EPLB in wanted and options.engine != "sglang":
        sys.exit(f"--contenders: {EPLB} needs SGLang's environment")
    policies = tuple(name for name in POLICIES if name in wanted)
    ideal = ["--allow-ideal"] if "ideal" in wanted else []
    cache = {"prefix_cache": True}  # as both engines have it by default
    all_of_them = (
        Contender((WITHOUT_EP,), partial(serve_without_ep, options, path, "bfloat16", **cache)),
        Contender(policies, partial(serve, options, path, "bfloat16", *ideal, **cache)),
        Contender((EPLB,), partial(eplb_server, path, WORK / "load-eplb.log", **cache)),
    )
    return [one for one in all_of_them if one.names and set(one.names) <= set(wanted)]


def measure(run: LoadRun, contender: Contender, repeat: int) -> None:
    """Start the server, measure all its windows, stop it."""
    began = time.monotonic()
    with contender.start() as running, closing(Server(running.url)) as server:
        print(f"{', '.join(contender.names)}: up in {time.monotonic() - began:.0f} s", flush=True)
        if isinstance(running, BalancedServer) and EPLB not in contender.names:
            with closing(Sidecar(running.sidecar_url, running.token)) as sidecar:
                windows(run, Servers(server, sidecar).ready_for, contender.names, repeat)
        else:
            windows(run, lambda _: server, contender.names, repeat)


def windows(
    run: LoadRun, ready_for: Callable[[str], Server], listed: Sequence[str], repeat: int
) -> None:
    """All windows of one server in one repeat."""
    run.check(ready_for(listed[0]))
    run.warm_up(ready_for, listed)
    run.measure(ready_for, listed, repeat)


if __name__ == "__main__":
    main()
