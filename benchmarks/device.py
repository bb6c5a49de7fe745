"""Device kernels on one GPU: every kernel against its CPU twin, then how long it takes.

    python benchmarks/device.py --json benchmarks/results/device.json     # a machine with a GPU
    python benchmarks/device.py --dry-run                                 # any machine, tiny sizes

Kernels are captured in CUDA graphs, so the checks are made on what a replay computed and the times
hold no launch by the host: microseconds are those of a graph of many repetitions, by CUDA events,
divided by their number, caches warm. Ranks are virtual: their memory lies in separate buffers of
one device, so rates are the device's own, not those of a link between devices. A dry run takes the
same path under Triton's interpreter and measures nothing.

The balancer is one rank whose peers have posted already. Its row has, beside what all rows have:
``experts_sent`` by it in each batch, ``verb_microseconds`` by CUDA events of a batch that the host
launched (between two verbs lies what the host takes to launch). Checked are the ids of replays with
the policy on, off and on again, and the record of the launched batch.
"""

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import triton
from ultraep_kernels.count import count_reference
from ultraep_kernels.device.count import count
from ultraep_kernels.device.exchange import exchange, inbox_bytes, new_epoch
from ultraep_kernels.device.plan import plan
from ultraep_kernels.device.relays import Sends, plan_sends
from ultraep_kernels.device.reroute import reroute
from ultraep_kernels.device.row import HEADER_WIDTH
from ultraep_kernels.device.status import DeviceStatus, new_status
from ultraep_kernels.device.stream import await_slots, stream
from ultraep_kernels.exchange import FLAG_BYTES
from ultraep_kernels.reroute import reroute as reroute_on_cpu

from ultraep_serve.balancer import TokenView
from ultraep_serve.config import BalanceConfig
from ultraep_serve.cuda.balancer import DeviceBalancer
from ultraep_serve.cuda.driver import open_driver
from ultraep_serve.cuda.fabric import DeviceFabric, Limits
from ultraep_serve.cuda.slots import DeviceSlotPool
from ultraep_serve.policies import plan_quota
from ultraep_serve.testing.host_driver import HostDriver
from ultraep_serve.testing.interpreter import restart_interpreted
from ultraep_serve.testing.mirror import mirrored_fabric
from ultraep_serve.testing.virtual_ranks import VirtualRanks, make_ranks, only, wrong_slots
from ultraep_serve.types import Decision, ExpertShape, Plan, Policy, Verb, imbalance

LOOKS = 1 << 22
POSTED = 1 << 40  # an epoch that no measurement reaches
SIDE_STREAMS = 16
PLAN_TARGET, ROUTING_TARGET, STREAM_TARGET = 40.0, 20.0, 0.9
T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """What is measured; shapes are those of the published measurements unless it is a dry run."""

    shape: ExpertShape
    tokens: int  # of one rank
    top_k: int
    imbalances: tuple[float, ...]
    tensor_bytes: tuple[int, ...]  # of one expert
    chunk_bytes: int
    copy_bytes: int  # of the buffer that tells the device's own bandwidth
    repetitions: int  # in one graph
    replays: int


FULL = Sizes(
    shape=ExpertShape(64, 256, 2),
    tokens=8192,
    top_k=8,
    imbalances=(1.5, 2.0, 3.0),
    tensor_bytes=(4096 * 4096, 4096 * 2048, 8192, 4096),  # FP8 weights and block scales
    chunk_bytes=1 << 20,
    copy_bytes=4 << 30,
    repetitions=20,
    replays=20,
)
TINY = Sizes(
    shape=ExpertShape(4, 16, 2),
    tokens=50,
    top_k=2,
    imbalances=(1.5, 3.0),
    tensor_bytes=(80, 37),
    chunk_bytes=64,
    copy_bytes=64,
    repetitions=1,
    replays=1,
)


@dataclass
class Report:
    """Everything that is written out."""

    command: list[str]
    dry_run: bool
    versions: dict[str, str | None]
    sizes: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, what: str, checked: str, **figures: Any) -> None:
        """One result: what was run, what it was checked against, and its figures."""
        self.rows.append({"what": what, "checked": checked, **figures})
        text = "  ".join(f"{name} {_text(value)}" for name, value in figures.items())
        print(f"{what:18} = {checked:34} {text}", flush=True)


def main() -> None:
    """Check and measure; a dry run starts itself again under the interpreter."""
    args = parse_arguments()
    if args.dry_run:
        restart_interpreted()
    if not args.dry_run and not torch.cuda.is_available():
        sys.exit("no GPU here; use --dry-run to see what would be measured")
    sizes = TINY if args.dry_run else FULL
    if args.dry_run:
        bench = Bench(sizes, "cpu")
    else:
        bench = Bench(sizes, "cuda", tuple(torch.cuda.Stream() for _ in range(SIDE_STREAMS)))
    report = Report(sys.argv, args.dry_run, versions(args.dry_run), asdict(sizes))
    if args.dry_run:
        print("dry run: tiny sizes under the interpreter, times would stand where - stands")
    for target in sizes.imbalances:
        measure_routing(bench, report, target)
    measure_exchange(bench, report)
    measure_stream(bench, report)
    measure_balancer(bench, report)
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="no GPU: tiny sizes, no times")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


@dataclass(frozen=True)
class Bench:
    """Sizes, and where and how to run."""

    sizes: Sizes
    device: str
    side_streams: tuple[torch.cuda.Stream, ...] = ()

    @property
    def num_programs(self) -> int:
        """Senders of a stream, as many as twice the multiprocessors."""
        if self.device == "cpu":
            return 2
        return 2 * torch.cuda.get_device_properties(self.device).multi_processor_count

    def at_once(self, functions: list[Callable[[], None]]) -> None:
        """Launch side by side on a few streams; later launches wait for all of them."""
        if self.device == "cpu":
            for function in functions:
                function()
            return
        current = torch.cuda.current_stream()
        for first, side in enumerate(self.side_streams):
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for function in functions[first :: len(self.side_streams)]:
                    function()
        for side in self.side_streams:
            current.wait_stream(side)

    def capture(self, function: Callable[[], T], repetitions: int) -> Callable[[], T]:
        """Replays a graph of ``function``, and returns what that computes."""
        if self.device == "cpu":
            return function
        function()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repetitions):
                result = function()

        def replay() -> T:
            graph.replay()
            return result

        return replay

    def time(self, function: Callable[[], T]) -> tuple[T, float | None]:
        """What a replayed graph of ``function`` computed, and microseconds for one repetition."""
        if self.device == "cpu":
            return function(), None
        replay = self.capture(function, self.sizes.repetitions)
        result = replay()
        times = []
        for _ in range(self.sizes.replays):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / self.sizes.repetitions)
        return result, statistics.median(times)


def measure_routing(bench: Bench, report: Report, target: float) -> None:
    """Plan, and count with reroute, of one rank at one imbalance."""
    shape, status = bench.sizes.shape, new_status(bench.device)
    ids = skewed_ids(bench.sizes, target)
    loads = loads_of(ids, shape)
    before = imbalance(loads.sum(0).reshape(shape.num_ranks, -1).sum(1))
    device_ids = torch.from_numpy(ids).to(bench.device)
    device_loads = torch.from_numpy(loads.astype(np.int32)).to(bench.device)
    expected = plan_quota(loads, shape, 0)
    found, plan_us = bench.time(lambda: plan(device_loads, shape.num_replica_slots, 0, status))
    for name in ("slot_expert", "quota", "share"):
        require_equal(getattr(found, name), getattr(expected, name), f"plan: {name}")
    report.add(
        "plan",
        "ultraep_serve.policies.plan_quota",
        imbalance_before=before,
        imbalance_after=imbalance(expected.quota.sum(0)),
        microseconds=plan_us,
        at_most=PLAN_TARGET,
    )
    routing_us = measure_count_and_reroute(bench, device_ids, found.share, expected, status)
    report.add(
        "count + reroute",
        "ultraep_kernels.reroute.reroute",
        imbalance_before=before,
        microseconds=routing_us,
        at_most=ROUTING_TARGET,
    )
    require_equal(status, np.array([DeviceStatus.OK]), "status")


def measure_count_and_reroute(
    bench: Bench, ids: torch.Tensor, share: torch.Tensor, expected: Plan, status: torch.Tensor
) -> float | None:
    """Microseconds of both, after checking both."""
    shape = bench.sizes.shape
    slot_expert = torch.from_numpy(expected.slot_expert).to(bench.device)

    def route() -> tuple[torch.Tensor, torch.Tensor]:
        counted = count(ids, shape.num_logical_experts)
        masters = shape.num_masters
        return counted.load, reroute(ids, counted, share, slot_expert, masters, status)

    (load, physical), microseconds = bench.time(route)
    require_equal(load, count_reference(ids.cpu(), shape.num_logical_experts)[0], "count")
    twin = reroute_on_cpu(ids.cpu(), expected.share, expected.slot_expert, shape.num_masters)
    require_equal(physical, twin.numpy(), "reroute")
    return microseconds


def measure_exchange(bench: Bench, report: Report) -> None:
    """One rank's exchange whose peers have all posted already: the part that is not waiting."""
    num_ranks, width = (
        bench.sizes.shape.num_ranks,
        HEADER_WIDTH + bench.sizes.shape.num_logical_experts,
    )
    size = inbox_bytes(num_ranks, width)
    inboxes = torch.zeros((num_ranks, size), dtype=torch.uint8, device=bench.device)
    flags = inboxes[0, : num_ranks * FLAG_BYTES].view(torch.int64).view(num_ranks, -1)
    flags[1:, 0] = POSTED
    rows = inboxes[0, num_ranks * FLAG_BYTES :].view(torch.int32).view(2, num_ranks, width)
    posted = torch.arange(num_ranks * width, dtype=torch.int32, device=bench.device)
    rows[:] = posted.view(num_ranks, width)
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=bench.device)
    row = posted[:width].clone()
    epoch, status = new_epoch(bench.device), new_status(bench.device)
    found, microseconds = bench.time(lambda: exchange(row, addresses, 0, epoch, status, LOOKS))
    require_equal(found, posted.view(num_ranks, width).cpu().numpy(), "exchange")
    require_equal(status, np.array([DeviceStatus.OK]), "status")
    report.add("exchange", "the rows posted", ranks=num_ranks, microseconds=microseconds)


def measure_stream(bench: Bench, report: Report) -> None:
    """All virtual ranks' copies of one plan, at the same time, against a plain copy."""
    sizes, shape = bench.sizes, bench.sizes.shape
    loads = loads_of(skewed_ids(sizes, sizes.imbalances[1]), shape)
    slots = torch.from_numpy(plan_quota(loads, shape, 0).slot_expert).to(bench.device)
    ranks = make_ranks(shape, sizes.tensor_bytes, sizes.chunk_bytes, bench.device)
    copy_rate = measure_copy(bench)
    moved = int((slots >= 0).sum()) * sum(sizes.tensor_bytes)
    for number, mode in enumerate(("never", "always"), 1):
        epoch = torch.tensor([number, 0], device=bench.device)
        status = new_status(bench.device)
        microseconds = stream_all(bench, ranks, slots, mode, epoch, status)
        for rank, tables in enumerate(ranks.tables):
            await_slots(slots, tables, rank, epoch, status, LOOKS)
        require_equal(status, np.array([DeviceStatus.OK]), "status")
        if wrong := wrong_slots(ranks, slots):
            sys.exit(f"stream: (rank, slot) {wrong} differ from their masters")
        for pool in ranks.pools:
            pool.zero_()
        rate = 2e-3 * moved / microseconds if microseconds else None
        report.add(
            f"stream, relay {mode}",
            "the masters' bytes",
            megabytes=moved / 1e6,
            microseconds=microseconds,
            gigabytes_per_second=rate,  # read and written
            of_copy=rate / copy_rate if rate and copy_rate else None,
            at_least=STREAM_TARGET,
        )


def stream_all(
    bench: Bench,
    ranks: VirtualRanks,
    slots: torch.Tensor,
    mode: str,
    epoch: torch.Tensor,
    status: torch.Tensor,
) -> float | None:
    """Microseconds in which all ranks send, and then forward, as they share a device."""
    shape = bench.sizes.shape
    sends = [
        plan_sends(slots, shape.num_masters, rank, mode, shape.num_ranks)
        for rank in range(shape.num_ranks)
    ]
    kinds = range(1 if mode == "never" else 2)
    phases = [[only(send, kind) for send in sends] for kind in kinds]

    def run() -> None:
        for phase in phases:
            bench.at_once([partial(send_all, rank, send) for rank, send in enumerate(phase)])

    def send_all(rank: int, send: Sends) -> None:
        arguments = ranks.tables[rank], rank, epoch, status, LOOKS
        stream(send, slots, shape.num_masters, *arguments, num_programs=bench.num_programs)

    return bench.time(run)[1]


def measure_balancer(bench: Bench, report: Report) -> None:
    """The whole data flow of one rank, launched and replayed, with all its peers' rows there."""
    sizes, shape = bench.sizes, bench.sizes.shape
    ids = skewed_ids(sizes, sizes.imbalances[1])
    loads = loads_of(ids, shape)
    notes, balancer, fabric = balancer_of_rank_0(bench, loads)
    device_ids = torch.from_numpy(ids).to(bench.device)
    expected = plan_quota(loads, shape, 0)
    twin = reroute_on_cpu(
        torch.from_numpy(ids), expected.share, expected.slot_expert, shape.num_masters
    ).numpy()
    identity = balancer.identity(device_ids).cpu().numpy()
    replay = bench.capture(lambda: balancer.route(0, device_ids, sizes.tokens), 1)
    for policy, physical in ((Policy.QUOTA, twin), (Policy.OFF, identity), (Policy.QUOTA, twin)):
        notes.policy = policy
        balancer.route(0, device_ids[:0], 0)  # where the host reads the policy; launches nothing
        require_equal(replay(), physical, f"balancer: replay with policy {policy.value}")
    notes.records.clear()
    require_equal(balancer.route(0, device_ids, sizes.tokens), twin, "balancer")
    balancer.computed()
    fabric.require_peers()  # waits, so that the record is there
    balancer.computed()
    record = notes.records[-1]
    require_equal(torch.from_numpy(record["slot_expert"]), expected.slot_expert, "record")
    require_equal(torch.from_numpy(record["load_after"]), expected.quota.sum(0), "record")
    _, microseconds = bench.time(lambda: balancer.route(0, device_ids, sizes.tokens))
    report.add(
        "balancer",
        "plan_quota and reroute on CPU",
        ranks=shape.num_ranks,
        microseconds=microseconds,
        experts_sent=record["bytes_sent"] // sum(sizes.tensor_bytes),
        verb_microseconds=None
        if bench.device == "cpu"
        else {verb.name.lower(): record["verb_ns"][verb] / 1e3 for verb in Verb},
    )
    fabric.require_peers()


def balancer_of_rank_0(
    bench: Bench, loads: np.ndarray
) -> tuple["Notes", DeviceBalancer, DeviceFabric]:
    """Of a group that has ``loads`` (R, E), rank 0's own among them."""
    sizes, shape = bench.sizes, bench.sizes.shape
    driver = HostDriver() if bench.device == "cpu" else open_driver(0)
    pool = DeviceSlotPool(driver, shape.num_replica_slots, sizes.chunk_bytes)
    layer = pool.adopt(
        [
            torch.ones((shape.num_masters, size), dtype=torch.uint8, device=driver.device)
            for size in sizes.tensor_bytes
        ]
    )
    rows = torch.zeros((shape.num_ranks, HEADER_WIDTH + loads.shape[1]), dtype=torch.int32)
    rows[:, HEADER_WIDTH:] = torch.from_numpy(loads)
    programs = max(1, bench.num_programs // 2)
    limits = Limits(rows.shape[1], layer.chunks.shape[0], LOOKS, programs)
    fabric = mirrored_fabric(driver, pool, rows.to(driver.device), limits)
    notes, config = Notes(), BalanceConfig(min_batch_tokens=1, max_imbalance=1.0)
    arguments = shape, TokenView.OWN, [layer], fabric, notes, notes
    return notes, DeviceBalancer(config, *arguments), fabric


@dataclass
class Notes:
    """Recorder and policy source in one."""

    policy: Policy = Policy.QUOTA
    max_imbalance_millionths: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)

    def record(self, **values: Any) -> None:
        """As ``Recorder.record``."""
        self.records.append(values)

    def count_batch(self, decision: Decision) -> None:
        """Batches are not looked at."""


def measure_copy(bench: Bench) -> float | None:
    """Gigabytes per second, read and written, of the device's own copy of a large buffer."""
    source = torch.ones(bench.sizes.copy_bytes // 8, dtype=torch.int64, device=bench.device)
    target = torch.empty_like(source)
    _, microseconds = bench.time(lambda: target.copy_(source))
    return 2e-3 * source.numel() * 8 / microseconds if microseconds else None


def skewed_ids(sizes: Sizes, target: float) -> np.ndarray:
    """(T, K) int32 distinct experts per token; their rank loads reach the wanted imbalance.

    Popularity 1/n^x in random order, x by bisection over the same random numbers.
    """
    rng = np.random.default_rng(0)
    experts = sizes.shape.num_logical_experts
    order = rng.permutation(np.log(np.arange(1, experts + 1)))
    noise = rng.gumbel(size=(sizes.tokens, experts))
    low, high = 0.0, 4.0
    for _ in range(12):
        exponent = (low + high) / 2
        scores = exponent * order - noise
        ids = np.argpartition(scores, sizes.top_k, axis=1)[:, : sizes.top_k]
        by_rank = np.bincount(ids.ravel() // sizes.shape.num_masters)
        reached = imbalance(np.append(by_rank, [0] * (sizes.shape.num_ranks - by_rank.size)))
        low, high = (exponent, high) if reached < target else (low, exponent)
    return ids.astype(np.int32)


def loads_of(ids: np.ndarray, shape: ExpertShape) -> np.ndarray:
    """(R, E): rank 0 counts ``ids``, the others draw as many from the same distribution."""
    load = np.bincount(ids.ravel(), minlength=shape.num_logical_experts)
    rng = np.random.default_rng(1)
    loads = rng.multinomial(ids.size, load / ids.size, size=shape.num_ranks)
    loads[0] = load
    return loads


def require_equal(found: torch.Tensor, expected: np.ndarray, what: str) -> None:
    """End with the name of what differs."""
    if not np.array_equal(found.cpu().numpy(), expected):
        sys.exit(f"{what} differs from its twin")


def versions(dry_run: bool) -> dict[str, str | None]:
    """Of everything that decides the figures."""
    return {
        "device": None if dry_run else torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
