"""What ranks are given to do, and what must come of it: batches as an engine routes them.

Every scenario drives ``DeviceBalancer`` of all ranks through batches of two layers. What it must
answer is what ``HostBalancer``, its twin, answers for the same ids.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from ultraep_kernels.contract import Search, search_of
from ultraep_kernels.device.status import DeviceStatus

from tests.emulated_gpu.kernels.compiled import Change
from tests.emulated_gpu.kernels.host import Cluster
from tests.emulated_gpu.kernels.machine import Finding, MachineError, Options
from tests.emulated_gpu.kernels.ranks import PATIENCE_NS, WEIGHTS, Rank, Weights
from tests.emulated_gpu.kernels.twins import Routed, Twins, moved
from tests.support.balancer_rigs import CONFIG
from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.balance.cuda import balancer as balancer_module
from ultraep_serve.errors import PeerTimeoutError
from ultraep_serve.system.topology import Location
from ultraep_serve.types import Decision, ExpertShape, Plan, Policy, TokenView

__all__ = ["SCENARIOS", "Batch", "Outcome", "Scenario", "play"]

NUM_LAYERS, TOP_K = 2, 2
_PREFILL, _DECODE = 100, 4  # tokens of a batch, for the threshold
_RESIDENT = (1, 2, 3, 5, 8, 1 << 20)  # programs of a rank at a time
_QUANTA = (1, 3, 16, 100)
_SOON_NS, _GAVE_UP = 2000, int(DeviceStatus.EXCHANGE_TIMEOUT)
_CONFIG = CONFIG.replace(allow_ideal=False, speeds="equal")


@dataclass(frozen=True)
class Batch:
    """What is routed in both layers."""

    kind: str  # "skewed", "one expert", "even", "padding", "unknown id"
    turn: int = 0  # which experts are the hot ones
    tokens: int = _PREFILL
    rows: int = 40  # tokens of rank 0; others have more
    dtype: torch.dtype = torch.int32
    runs: bool = True  # whether hosts wait for the device before the next batch
    policy: Policy = Policy.QUOTA  # that rank 0 asks for
    changes: bool = False  # whether rank 1's experts have changed since the batch before

    def ids(self, rank: int, num_experts: int) -> torch.Tensor:
        """(T, K) logical of one rank."""
        rng = np.random.default_rng(100 * self.turn + rank)
        size = self.rows + 30 * (rank % 3), TOP_K
        if self.kind == "even":
            ids = np.arange(num_experts * TOP_K).reshape(-1, TOP_K) % num_experts
        else:
            ids = (rng.geometric(0.4, size=size) - 1 + self.turn) % num_experts
        if self.kind == "one expert":
            ids = np.where(rng.random(size) < 0.7, self.turn % num_experts, ids)
        if self.kind == "padding":
            ids[:] = -1
        elif self.kind != "even":
            ids[::9] = -1
        if self.kind == "unknown id" and rank == 1:
            ids[5, 0] = 1 << 20
        return torch.from_numpy(ids).to(self.dtype)


_SEVERAL = (  # balanced, left alone, expected to be left alone and followed up, decode
    Batch("skewed"),
    Batch("even", runs=False),
    Batch("even"),
    Batch("even"),
    Batch("skewed", 5, dtype=torch.int64),
    Batch("skewed", 1, _DECODE, runs=False),
    Batch("skewed", 2),
)
_BRIEFLY = Search(512, first=2, limit=4, sweeps=8, thrifty=2)
_FIRST = (Batch("skewed"),)
_BALANCED = (Batch("skewed", runs=False), Batch("skewed", 3))
_STAYING = (  # copies that are there do, some are wanted beside them, experts change; off between
    Batch("skewed"),
    Batch("skewed", runs=False),
    Batch("even"),
    Batch("skewed", 1),
    Batch("skewed", changes=True),
    Batch("unknown id"),
    Batch("one expert", 2, policy=Policy.OFF),
    Batch("one expert", 2),
    Batch("skewed", 1, _DECODE),
    Batch("skewed"),
    Batch("skewed", 3),
)
_STRANGE = Batch("unknown id"), Batch("padding")
_RELAYED = (Batch("one expert", runs=False), Batch("one expert", 3))
_TURNS_OUT = (  # sent beside dispatch, left alone, and expected to be left alone but followed up
    Batch("skewed"),
    Batch("even", runs=False),
    Batch("skewed", 3),
    Batch("skewed", 1),
)
_MANY_IDS = (  # more blocks of ids than are added up at a time, and than one program looks up
    Batch("skewed", rows=8300),
    Batch("skewed", 1, _DECODE, rows=600),
)
_ON, _OFF = Policy.QUOTA, Policy.OFF
_POLICIES = (_ON, _ON, _ON, _OFF, _ON, _OFF, _OFF, _OFF, _ON, _ON)  # any three that follow
_SWITCHED = tuple(
    batch
    for turn, policy in enumerate(_POLICIES)
    for batch in (
        Batch("skewed", turn, policy=policy, runs=turn % 3 != 2),
        Batch("skewed", turn, _DECODE, policy=policy),
    )
)


def _two_micro_batches(num_ranks: int, num_experts: int) -> ExpertShape:
    return ExpertShape(num_ranks, num_experts, 1, num_micro_batches=2)


@dataclass(frozen=True)
class Scenario:
    """Ranks and what they are given."""

    name: str
    shape: ExpertShape
    batches: tuple[Batch, ...] = _SEVERAL
    view: TokenView = TokenView.OWN
    relay: str = "auto"
    speeds: str = "equal"
    domain_size: int | None = None
    slot_memory: Literal["per_layer", "shared"] = "shared"
    weights: Weights = WEIGHTS
    search: Search | None = _BRIEFLY  # None: as it serves
    least_resident: int = 1  # programs of a rank that must fit a device together
    calibrates: bool = False
    is_silent: bool = False  # rank 0 does nothing, and the other three give up soon
    dispatches: bool = False  # with a stand-in for a dispatch that takes all multiprocessors
    is_quick: bool = False  # played by a quick check too

    def options_of(self, seed: int, resident: int = 0) -> Options:
        """How a seed's run is made: few or many programs at a time, short turns or long ones.

        ``resident`` programs of a rank at a time; 0: as the seed has it, or the scenario.
        """
        if self.dispatches:
            resident = 2 * self.shape.num_ranks
        fits = resident or max(self.least_resident, _RESIDENT[seed % len(_RESIDENT)])
        quantum = _QUANTA[seed // len(_RESIDENT) % len(_QUANTA)]
        return Options(seed=seed, resident=fits, quantum=quantum, order=(0, 2, 1, 0)[seed % 4])

    def setup_of(self, rank: int) -> GroupSetup:
        """Of one rank."""
        size = self.domain_size or self.shape.num_ranks
        config = _CONFIG.replace(speeds=self.speeds, slot_memory=self.slot_memory)
        location = Location(rank, self.shape.num_ranks, size, size)
        return GroupSetup(
            config,
            self.shape,
            self.view,
            location,
            relay=self.relay,
            chunk_bytes=self.weights.chunk_bytes,
        )


SCENARIOS = {
    each.name: each
    for each in (
        Scenario("one batch", ExpertShape(2, 8, 1), _FIRST),
        Scenario("two ranks", ExpertShape(2, 8, 1), is_quick=True),
        Scenario("four ranks", ExpertShape(4, 16, 2), speeds="1.0,0.5,1.0,0.8"),
        Scenario("measured speeds", ExpertShape(4, 16, 2), _BALANCED, speeds="auto", is_quick=True),
        Scenario("eight ranks", ExpertShape(8, 64, 2), search=None),
        Scenario("relays", ExpertShape(4, 8, 1), _BALANCED, relay="always", is_quick=True),
        Scenario("relays of eight", ExpertShape(8, 16, 1), _RELAYED),
        Scenario("relays expected to be left alone", ExpertShape(4, 8, 1), relay="always"),
        Scenario("many slots", ExpertShape(4, 32, 16), _BALANCED, relay="always"),  # 64 in all
        Scenario("nine slots", ExpertShape(4, 32, 9), _BALANCED, relay="always", is_quick=True),
        Scenario("many masters and three slots", ExpertShape(2, 20, 3), _BALANCED),
        Scenario("many ranks", ExpertShape(36, 72, 1), _FIRST),  # more than lanes
        Scenario("many ids", ExpertShape(2, 8, 1), _MANY_IDS, is_quick=True),
        Scenario(
            "many chunks",
            ExpertShape(2, 8, 1),
            _TURNS_OUT,
            weights=Weights(chunk_bytes=64),
            is_quick=True,
        ),
        Scenario(  # copied in several steps, some of them byte by byte
            "long chunks",
            ExpertShape(4, 8, 1),
            _TURNS_OUT,
            relay="always",
            weights=Weights(((200, 25), (1301,)), chunk_bytes=1 << 15),
            is_quick=True,
        ),
        Scenario("off and on", ExpertShape(2, 8, 1), _SWITCHED, is_quick=True),
        Scenario(
            "off and on in micro-batches", _two_micro_batches(2, 8), _SWITCHED, least_resident=8
        ),
        Scenario("shared tokens", ExpertShape(4, 8, 1), view=TokenView.SHARED, is_quick=True),
        Scenario("micro-batches", _two_micro_batches(4, 8), _BALANCED, least_resident=8),
        Scenario("micro-batches of two", _two_micro_batches(2, 8), _BALANCED, least_resident=8),
        Scenario("micro-batches of eight", _two_micro_batches(8, 16), _BALANCED, least_resident=8),
        Scenario("domains of four", ExpertShape(8, 32, 1), domain_size=4),
        Scenario("two domains", ExpertShape(4, 16, 1), domain_size=2),
        Scenario(
            "copies stay",
            ExpertShape(2, 8, 2),
            _STAYING,
            slot_memory="per_layer",
            is_quick=True,
        ),
        Scenario(
            "copies stay in domains",
            ExpertShape(6, 18, 2),
            _STAYING,
            speeds="auto",
            domain_size=3,
            relay="always",
            slot_memory="per_layer",
        ),
        Scenario(
            "copies stay in micro-batches",
            _two_micro_batches(4, 8),
            _STAYING,
            least_resident=8,
            slot_memory="per_layer",
        ),
        Scenario(
            "unknown ids",
            ExpertShape(2, 8, 1),
            (Batch("unknown id"), Batch("padding")),
            is_quick=True,
        ),
        Scenario("a silent rank", ExpertShape(4, 8, 2), _FIRST, is_silent=True, is_quick=True),
        Scenario("dispatch", ExpertShape(4, 8, 1), _BALANCED, dispatches=True, is_quick=True),
        Scenario(
            "dispatch and relays", ExpertShape(4, 8, 1), _BALANCED, relay="always", dispatches=True
        ),
        Scenario("calibration", ExpertShape(4, 8, 1), (), calibrates=True, is_quick=True),
    )
}


@dataclass
class Outcome:
    """What came of a run."""

    launches: int = 0
    steps: int = 0
    findings: list[Finding] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # answers that differ from the twin's
    failure: str = ""  # a deadlock, or what PTX does not allow

    @property
    def is_right(self) -> bool:
        """Whether nothing was found."""
        return not (self.findings or self.wrong or self.failure)

    def __str__(self) -> str:
        return "; ".join(filter(None, [*map(str, self.findings), *self.wrong, self.failure]))


def play(
    scenario: Scenario, options: Options, change: Change | None = None, forgets: str = ""
) -> Outcome:
    """All batches of a scenario on a machine; with mistakes of kernels or hosts, or without."""
    player = _Player(scenario, options, change, forgets)
    try:
        with searching(scenario.search):
            player.play()
    except MachineError as error:
        player.outcome.failure = str(error)
    finally:
        player.finish()
    return player.outcome


class searching:
    """Inside, planners of hosts and devices make as many attempts as ``search`` says."""

    def __init__(self, search: Search | None) -> None:
        import ultraep_kernels.device.plan as on_device
        import ultraep_kernels.host.plan as on_host

        self._modules, self._search = (on_device, on_host), search

    def __enter__(self) -> None:
        for module in self._modules:
            module.search_of = search_of if self._search is None else lambda *_: self._search

    def __exit__(self, *_: object) -> None:
        for module in self._modules:
            module.search_of = search_of


@dataclass(frozen=True)
class _Place:
    """Which of a batch's layers, and where."""

    rank: Rank
    layer: int
    micro_batch: int

    def __str__(self) -> str:
        return f"rank {self.rank.number}, layer {self.layer}, micro-batch {self.micro_batch}"


class _Player:
    def __init__(
        self, scenario: Scenario, options: Options, change: Change | None, forgets: str
    ) -> None:
        self._scenario, self.outcome = scenario, Outcome()
        with searching(scenario.search):
            patience_ns = _SOON_NS if scenario.is_silent else PATIENCE_NS
            given = scenario.setup_of, NUM_LAYERS, scenario.weights
            self._cluster = Cluster(*given, options, change, forgets, patience_ns)
        numbers = range(scenario.shape.num_micro_batches)
        self._twins = [Twins(scenario.shape, *given) for _ in numbers]
        self._policies: list[Policy] = []  # of the batches that exchanged
        self._checks: list[Callable[[], None]] = []  # when the device is done
        self._plans: dict[tuple[int, int], tuple[_Place, Plan | None]] = {}
        self._changes = 0  # of rank 1's experts

    def play(self) -> None:
        cluster = self._cluster
        with cluster.driven():
            if self._scenario.calibrates:
                self._calibrate()
            if self._scenario.is_silent:
                self._give_up()
                return
            for batch in self._scenario.batches:
                self._batch(batch)
                if batch.runs:
                    self._run()
            self._run()
        if self._scenario.shape.num_micro_batches == 1 and self._scenario.batches:
            self._compare_records()

    def finish(self) -> None:
        cluster = self._cluster
        self.outcome.launches, self.outcome.steps = cluster.num_launches, cluster.machine.steps
        self.outcome.findings = cluster.machine.findings()
        for rank in cluster.ranks:
            expected = _GAVE_UP if self._scenario.is_silent and rank.number else 0
            if cluster.machine.has_stopped(rank.number) != bool(expected):
                self.outcome.wrong.append(f"rank {rank.number} stops, or does not")
            for word in (rank.fabric.status, rank.fabric.reported):
                if (status := int(word.item())) != expected:
                    self.outcome.wrong.append(f"status {status} of rank {rank.number}")
        cluster.close()

    def _give_up(self) -> None:
        """Whoever waits for rank 0 gives up: no experts run on it, and nobody reads its tokens.

        Rank 1 sends beside dispatch, what rank 2 launches is captured, rank 3 expects nothing.
        """
        ranks, num_experts = self._cluster.ranks, self._scenario.shape.num_logical_experts
        ranks[3].balancer._expected.without_copies = {(layer, 0) for layer in range(NUM_LAYERS)}
        captured = mock.patch.object(balancer_module, "is_capturing", return_value=True)
        for rank in ranks[1:]:
            balancer, ids = rank.balancer, self._scenario.batches[0].ids(rank.number, num_experts)
            with captured if rank.number == 2 else nullcontext(), self._cluster.of(rank.number):
                for layer in range(NUM_LAYERS):
                    balancer.route(layer, ids, _PREFILL)
                    balancer.receive()
                    self._never(rank, "experts run")
                    balancer.computed()
                balancer.route(0, ids[:_DECODE], _DECODE)
                self._never(rank, "tokens are read")
        self._run()
        for rank in ranks[1:]:
            try:
                rank.balancer.route(0, ids, _PREFILL)
                self.outcome.wrong.append(f"rank {rank.number} goes on")
            except PeerTimeoutError as error:
                if "the load exchange" not in str(error):
                    self.outcome.wrong.append(f"rank {rank.number}: {error}")

    def _never(self, rank: Rank, what: str) -> None:
        text = f"{what} on rank {rank.number}, which gave up"
        self._cluster.call(rank.number, lambda: self.outcome.wrong.append(text))

    def _run(self) -> None:
        self._cluster.run()
        for check in self._checks:
            check()
        for place, plan in self._plans.values():
            if plan is not None:
                self._compare_plan(place, plan)
        self._checks.clear()
        self._plans.clear()

    def _batch(self, batch: Batch) -> None:
        """All of its layers; hosts go by the policy of the batch before last behind the first."""
        if batch.changes:
            self._change()
        for recorder in (self._cluster.ranks[0].recorder, *(twins.asked for twins in self._twins)):
            recorder.policy = batch.policy
        rests = self._policies[-2:-1] == [Policy.OFF] and batch.tokens == _PREFILL
        for layer in range(NUM_LAYERS):
            self._layer(batch, layer, rests)
        if batch.tokens == _PREFILL:
            self._policies.append(batch.policy)

    def _change(self) -> None:
        """Rank 1's experts become others, which its engine says."""
        self._run()
        self._changes += 1
        rank, num_masters = self._cluster.ranks[1], self._scenario.shape.num_masters
        for tensor in (each for layer in rank.layers for each in layer.tensors):
            tensor[:num_masters] += 1
        rank.balancer.forget()
        for twins in self._twins:
            twins.forget(rank.number)

    def _masters(self, owner: int, layer: int) -> list[torch.Tensor]:
        masters = self._scenario.weights.of(owner, layer, self._scenario.shape.num_masters)
        changes = self._changes if owner == 1 else 0
        return [tensor + 1 for tensor in masters] if changes else masters

    def _layer(self, batch: Batch, layer: int, rests: bool) -> None:
        """Every rank routes it, then its engine dispatches and computes."""
        shape, cluster = self._scenario.shape, self._cluster
        is_shared = self._scenario.view is TokenView.SHARED
        for number, twins in enumerate(self._twins):
            turned = replace(batch, turn=batch.turn + 4 * number + layer)
            sources = [0 if is_shared else n for n in range(shape.num_ranks)]
            ids = [turned.ids(n, shape.num_logical_experts) for n in sources]
            is_identity = rests and (layer, number) != (0, 0)
            expected = twins.identity(ids) if is_identity else twins.route(layer, ids, batch.tokens)
            for n, own in enumerate(ids):
                with cluster.of(n) as rank:
                    physical = rank.balancer.route(layer, own, batch.tokens, number)
                    self._dispatch(rank, number)
                    self._compute(_Place(rank, layer, number), physical, expected[n])
        for number in range(len(self._twins)):
            for n in range(shape.num_ranks):
                with cluster.of(n) as rank:
                    rank.balancer.computed(number)

    def _dispatch(self, rank: Any, number: int) -> None:
        part = rank.balancer._parts[number]
        if self._cluster.forgets == "place" and part._sent is not None:
            with part.side:  # slots are awaited beside dispatch
                part._streams.receive(part._sent, rank.fabric.patience_ns)
        if self._scenario.dispatches:
            self._cluster.dispatch(rank.number)

    def _compute(self, place: "_Place", physical: torch.Tensor, twin: Routed) -> None:
        """The engine's part: dispatch reads ids, experts read slots; and what must be there."""
        cluster, shape, wrong = self._cluster, self._scenario.shape, self.outcome.wrong
        rank = place.rank
        expected = moved(twin.physical, shape, place.micro_batch).to(physical.dtype)
        experts = [] if twin.plan is None else twin.plan.slot_expert[rank.number].tolist()
        first = shape.num_masters + place.micro_batch * shape.num_replica_slots

        def dispatch() -> None:
            cluster.touch(physical, rank.number, "dispatch reads ids")
            if not torch.equal(physical, expected):
                wrong.append(f"ids of {place}")

        def compute() -> None:
            for slot, expert in enumerate(experts):
                if expert < 0:
                    continue
                owner, local = divmod(expert, shape.num_masters)
                masters = self._masters(owner, place.layer)
                for tensor, master in zip(rank.layers[place.layer].tensors, masters, strict=True):
                    cluster.touch(tensor[first + slot], rank.number, "experts read slots")
                    if not torch.equal(tensor[first + slot], master[local]):
                        wrong.append(f"slot {slot} of {place}")

        cluster.call(rank.number, dispatch)
        rank.balancer.receive(place.micro_batch)
        cluster.call(rank.number, compute, aside=cluster.forgets == "experts")
        rank.balancer.experts_done(place.micro_batch)
        if place.layer == NUM_LAYERS - 1:
            self._plans[rank.number, place.micro_batch] = place, twin.plan

    def _compare_plan(self, place: "_Place", plan: Plan) -> None:
        """The last layer's, which nothing has overwritten."""
        slots, wrong = self._scenario.shape.num_replica_slots, self.outcome.wrong
        found = place.rank.balancer._parts[place.micro_batch].plan.found
        own = slice(place.micro_batch * slots, (place.micro_batch + 1) * slots)
        if not np.array_equal(found.slot_expert.numpy()[:, own], plan.slot_expert):
            wrong.append(f"slots planned by {place}")
        if not np.array_equal(found.copied.numpy()[:, own], plan.copied):
            wrong.append(f"copies planned by {place}")
        for name in ("quota", "share"):
            if not np.array_equal(getattr(found, name).numpy(), getattr(plan, name)):
                wrong.append(f"{name} of {place}")

    def _compare_records(self) -> None:
        for rank in self._cluster.ranks:
            rank.balancer._record_what_is_done()
            if _plain(rank.recorder.events) != _plain(self._twins[0].events(rank.number)):
                self.outcome.wrong.append(f"records of rank {rank.number}")

    def _calibrate(self) -> None:
        """What is launched before a server serves: rows, plans and copies without a decision."""
        shape, cluster = self._scenario.shape, self._cluster
        slot_expert = torch.full((shape.num_ranks, shape.num_slots), -1, dtype=torch.int32)
        slot_expert[:, 0] = torch.arange(shape.num_ranks).roll(-1) * shape.num_masters
        width = cluster.ranks[0].fabric.limits.row_width
        rows = [torch.arange(width, dtype=torch.int32) + 1000 * n for n in range(shape.num_ranks)]
        for n, row in enumerate(rows):
            with cluster.of(n) as rank:
                self._exchange_and_send(rank, row, torch.stack(rows), slot_expert.clone())

    def _exchange_and_send(
        self, rank: Any, row: torch.Tensor, rows: torch.Tensor, slot_expert: torch.Tensor
    ) -> None:
        shape, fabric, wrong = self._scenario.shape, rank.fabric, self.outcome.wrong
        chunks = fabric.chunks(rank.layers[0])
        for turn, mode in enumerate(("never", "always"), 1):
            found = fabric.exchange(row)
            sends = fabric.sends(slot_expert, shape.num_masters, mode)
            sends.epoch.fill_(turn)
            stream = fabric.stream(slot_expert, shape.num_masters, sends)
            stream.send(chunks)
            stream.receive(chunks, fabric.patience_ns)

            def check(found: torch.Tensor = found) -> None:
                if not torch.equal(found, rows):
                    wrong.append(f"rows of rank {rank.number}")
                owner, local = divmod(int(slot_expert[rank.number, 0]), shape.num_masters)
                masters = self._scenario.weights.of(owner, 0, shape.num_masters)
                for tensor, master in zip(rank.layers[0].tensors, masters, strict=True):
                    if not torch.equal(tensor[shape.num_masters], master[local]):
                        wrong.append(f"slot 0 of rank {rank.number}")

            self._checks.append(check)


def _plain(events: list[Any]) -> tuple[list[dict[str, Any]], Counter[Decision]]:
    """Records in order, without what is measured; and batches without, which hosts count sooner."""
    records = [each for each in events if isinstance(each, dict)]
    kept = [{k: v for k, v in each.items() if k != "experts_ns"} for each in records]
    return kept, Counter(each for each in events if not isinstance(each, dict))
