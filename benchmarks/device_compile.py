"""What every device kernel needs of a processor, from the compiler alone: no GPU is used.

    python benchmarks/device_compile.py --json benchmarks/results/device-compile.json

Launchers run on tensors in host memory with their launches recorded; every kernel is then compiled
for Hopper (sm_90) and Blackwell (sm_100) with the types and constants of its launch. Registers and
spills are what ptxas reports.
"""

import re
from dataclasses import asdict, dataclass

import harness
import torch
import triton
from ultraep_kernels.contract import HEADER_WIDTH, Prices
from ultraep_kernels.device.count import Count, RowWanted
from ultraep_kernels.device.exchange import Inboxes, exchange, new_epoch
from ultraep_kernels.device.identity import Identity
from ultraep_kernels.device.outcome import outcome_width
from ultraep_kernels.device.plan import (
    Gate,
    Given,
    Planner,
    Rows,
    Sender,
    new_states,
    plan_sizes,
)
from ultraep_kernels.device.relays import has_relays, plan_sends
from ultraep_kernels.device.status import new_status
from ultraep_kernels.device.stream import CHUNK_WORDS, Programs, Reach, Stream, StreamSizes

from tests.support.offline import (
    KernelFacts,
    Launch,
    compile_launch,
    recorded_launches,
)

TOKENS, TOP_K = 8192, 8  # of one rank
CHUNKS = 48  # of one expert
SENDERS, PATIENCE_NS = 32, 60_000_000_000
GATE = Gate(1_020_000, 900_000, 4_000_000, 30_000_000)
PRICES = Prices(34_133, 73_955)
LABEL = re.compile(r"(\$L__BB\w+):")
BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L__BB\w+)")
POLL = re.compile(r"\bnanosleep\b|\bld\.(?:acquire|relaxed)\.sys\b")


@dataclass(frozen=True)
class Case:
    """Sizes that kernels are compiled for."""

    num_ranks: int
    num_experts: int
    num_slots: int
    domain_size: int | None = None
    keeps: bool = False  # whether plans beside copies that stay are compiled too

    def __str__(self) -> str:
        domain = f" D{self.domain_size}" if self.domain_size else ""
        return f"R{self.num_ranks} E{self.num_experts} S{self.num_slots}{domain}"


CASES = (
    Case(8, 128, 2, keeps=True),  # one server
    Case(64, 256, 2, keeps=True),  # the sizes of the published measurements
    Case(64, 256, 2, domain_size=8),  # eight servers
    Case(72, 288, 2),  # as many ranks as there are, no power of two
    Case(72, 504, 4),
    Case(64, 896, 2),  # as many experts
)


def main() -> None:
    """Print the table; write it with the compiler's version to --json."""
    parser = harness.parser(__doc__)
    parser.add_argument("--archs", type=int, nargs="+", default=[90, 100])
    args = parser.parse_args()
    rows = []
    print(f"{'sizes':18} {'kernel':22} {'sm':>4} {'grid':>10} {'warps':>5} {'registers':>9} "
          f"{'spilled':>8} {'shared':>7}")  # fmt: skip
    for case in CASES:
        for launch in launches_of(case):
            for arch in args.archs:
                facts = compile_launch(launch, arch)
                rows.append(row_of(case, launch, facts))
                print(f"{case!s:18} {facts.name:22} {arch:4} {facts.grid!s:>10} "
                      f"{facts.num_warps:5} {facts.registers:9} {facts.spill_bytes:8} "
                      f"{facts.shared_bytes:7}", flush=True)  # fmt: skip
    versions = {"triton": triton.__version__, "torch": torch.__version__}
    harness.write(args.json, {"versions": versions, "device": None, "rows": rows})


def launches_of(case: Case) -> list[Launch]:
    """One launch of every kernel that serves by rank 1, as the data flows.

    Of all ranks' launches those of rank 1 differ most: a launch makes a constant of every 1.
    """
    ranks, experts, slots = case.num_ranks, case.num_experts, case.num_slots
    masters, domain_size = experts // ranks, case.domain_size or ranks
    status, epoch = new_status("cpu"), new_epoch("cpu")
    addresses = torch.zeros(ranks, dtype=torch.int64)
    inboxes = Inboxes(addresses, 1, epoch, status)
    reach = Reach(addresses, addresses, CHUNKS, status, status)
    programs = Programs(SENDERS, SENDERS if has_relays("auto", domain_size) else 0)
    rows = torch.zeros((ranks, HEADER_WIDTH + experts), dtype=torch.int32)
    ids = torch.zeros((TOKENS, TOP_K), dtype=torch.int32)
    count = Count(experts, "cpu", RowWanted(torch.zeros(3, dtype=torch.int32), inboxes, rows))
    count.fit(ids)
    kind = {"measures_speeds": True, "writes_identity": False}
    plan, keeper = (
        Planner(
            plan_sizes(ranks, experts, slots, domain_size, keeps=keeps, **kind),
            Given(Rows.of(rows[:, HEADER_WIDTH:]), status, Rows.of(rows), gate=GATE),
            Sender(source=1, rank=1, relay="auto", epoch=epoch),
            reach,
            programs,
            PRICES,
        )
        for keeps in (False, True)
    )
    state = new_states(1, experts, ranks, slots, status.device)[0]
    sent = plan.found.sends, plan.found.copied, 1
    stream = Stream(*sent, reach, StreamSizes(ranks, masters, slots, programs))
    outcome = torch.zeros(outcome_width(experts, ranks, slots), dtype=torch.int32)
    chunks = torch.zeros(1 + CHUNK_WORDS.value * CHUNKS, dtype=torch.int64)
    with recorded_launches() as launches:
        count(ids, PATIENCE_NS)
        plan(ids, ids, count, outcome)
        # expected to be left alone
        plan(ids, ids, count, outcome, None, (chunks, PATIENCE_NS))
        if case.keeps:
            keeper(ids, ids, count, outcome, state)
            keeper(ids, ids, count, outcome, state, (chunks, PATIENCE_NS))
        stream.send(chunks)
        stream.receive(chunks, PATIENCE_NS)
        Identity(experts, masters, slots)(ids, ids)
        exchange(count.row, inboxes, PATIENCE_NS)  # of what ranks compare at start, as the next
        plan_sends(plan.found.slot_expert, masters, "auto", domain_size, 1)
    return launches


def row_of(case: Case, launch: Launch, facts: KernelFacts) -> dict[str, object]:
    """One row of the report."""
    figures = asdict(facts)
    figures["follows_plan"] = launch.arguments.get("STREAMS") is not None
    figures["vector_copies"] = figures["ptx"].count("ld.global.v4")
    figures["alias_fences"] = figures["ptx"].count("fence.proxy.alias")
    figures["traps"] = len(re.findall(r"\btrap;", figures["ptx"]))
    figures["flags_posted"] = len(re.findall(r"\bst\.(?:release|relaxed)\.sys\b", figures["ptx"]))
    figures["flags_read"] = len(re.findall(r"\bld\.(?:acquire|relaxed)\.sys\b", figures["ptx"]))
    figures["polling_atomics"] = polling_atomics(figures["ptx"])
    figures["reads_program_id"] = re.search(r"%ctaid\b", figures["ptx"]) is not None
    figures["system_atomics"] = len(re.findall(r"\batom\.global\S*\.sys\b", figures["ptx"]))
    figures["clock_reads"] = figures["ptx"].count("%globaltimer")
    del figures["ptx"]
    return {**asdict(case), **figures}


def polling_atomics(ptx: str) -> int:
    """Atomic operations in loops that wait for others, where a plain look would do."""
    lines = ptx.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := LABEL.match(line))}
    loops = [
        (labels[found[1]], i)
        for i, line in enumerate(lines)
        if (found := BRANCH.search(line)) and labels.get(found[1], i) < i
    ]
    atoms = 0
    for first, last in loops:
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops):
            body = "\n".join(lines[first : last + 1])
            if POLL.search(body):
                atoms += len(re.findall(r"\batom\.", body))
    return atoms


if __name__ == "__main__":
    main()
