"""Order between streams: two ranks of the device's balancer, with work held back by seed.

In a batch nobody waits for the device, as in an engine: ids are routed and dispatched (copied),
experts add up their bytes, the host gets a copy of the ids in a stream of its own, and now and then
there is decode in a CUDA graph. Afterwards all of it is compared with what masters give. Each of
``MISTAKES`` leaves out one thing that keeps the order, which one of a few seeds must show.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from tests.emulated_gpu.operators.host import in_stream
from tests.support import balancer_rigs as rigs
from tests.support.balancer_rigs import LAYERS
from tests.support.ranks import fresh_run_path, outcomes_of_ranks
from ultraep_serve.balance.cuda.balancer import DeviceBalancer
from ultraep_serve.balance.cuda.driver import open_driver
from ultraep_serve.balance.cuda.micro_batch import MicroBatch, SideStream
from ultraep_serve.balance.cuda.pages import Batches, Page
from ultraep_serve.types import ExpertShape, Stage, TokenView

__all__ = ["check_order"]

SEEDS, MOST_SEEDS = range(1, 4), range(1, 9)  # that are right; of a mistake, until one shows it
BATCHES, DECODES_EVERY = 8, 4  # batches
TOKENS, DECODED, TOP_K, WIDTH, OTHERS = 24, 4, 2, 128, 200
SHAPE = ExpertShape(2, 8, 1)
PATIENCE_NS, SECONDS = 10_000_000_000, 150
Numbers = NDArray[np.int32]


def check_order() -> dict[str, Any]:
    """Seeds with which each mistake shows. Raises where one does not, or anything else is wrong."""
    for slot_memory in "shared", "per_layer":
        for seed in SEEDS:
            if found := wrong(seed, slot_memory):
                raise RuntimeError(f"with {slot_memory} slots, seed {seed}: {found}")
    shown = {}
    for mistake in MISTAKES:
        shown[mistake] = next((seed for seed in MOST_SEEDS if wrong(seed, "shared", mistake)), 0)
    if missed := [mistake for mistake, seed in shown.items() if not seed]:
        raise RuntimeError(f"no seed has shown {missed}")
    return {"seeds": len(SEEDS), "mistakes": shown}


def wrong(seed: int, slot_memory: str, mistake: str = "") -> list[str]:
    """What is wrong with what two ranks computed, in words."""
    with fresh_run_path() as path:
        given = path, seed, slot_memory, mistake
        ranks = outcomes_of_ranks(run_batches, 2, *given, timeout_seconds=SECONDS)
    if failed := [str(rank) for rank in ranks if rank.value is None]:
        return failed
    found = [problem for rank in ranks for problem in rank.value[0]]
    parts = [rank.value[1] for rank in ranks]
    ids, small = all_ids()
    prefill, decode = (one + other for one, other in zip(*parts, strict=True))
    for number in range(BATCHES):
        for layer in range(LAYERS):
            if not np.array_equal(prefill[number, layer], sums(layer, ids[number, layer])):
                found.append(f"tokens of batch {number} in layer {layer}")
        decodes = number % DECODES_EVERY == DECODES_EVERY - 1
        if decodes and not np.array_equal(decode[number], sums(0, small[number])):
            found.append(f"tokens of decode after batch {number}")
    return found


def all_ids() -> tuple[Numbers, Numbers]:
    """Of prefill (B, layers, T, K), skewed in every layer to other experts; of decode (B, D, K)."""
    rng, experts = np.random.default_rng(1), SHAPE.num_logical_experts
    ids = np.minimum(rng.geometric(0.5, (BATCHES, LAYERS, TOKENS, TOP_K)) - 1, experts - 1)
    names = rng.permuted(np.tile(np.arange(experts), (BATCHES, LAYERS, 1)), axis=2)
    ids = np.take_along_axis(names, ids.reshape(BATCHES, LAYERS, -1), 2).reshape(ids.shape)
    ids[:, :, ::9] = -1
    small = rng.integers(0, experts, (BATCHES, DECODED, TOP_K))
    return ids.astype(np.int32), small.astype(np.int32)


def sums(layer: int, ids: Numbers) -> Numbers:
    """What masters give for ``ids`` (T, K): (T, WIDTH), whole numbers, whatever the order."""
    masters = [rigs.masters_of(rank, layer, SHAPE.num_masters)[0] for rank in range(2)]
    words = torch.cat(masters).flatten(1).view(torch.int32).numpy()
    padded = np.pad(words, ((0, 1), (0, -words.shape[1] % WIDTH)))  # of padding, -1, nothing
    return padded.reshape(len(padded), -1, WIDTH).sum(1, np.int32)[ids].sum(1, np.int32)


@triton.jit
def _experts_kernel(
    ids_ptr, words_ptr, out_ptr, first, NUM_LOCAL: tl.constexpr, SIZE: tl.constexpr,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, columns = tl.program_id(0), tl.arange(0, WIDTH)
    total = tl.full((WIDTH,), 0, tl.int32)
    for k in range(TOP_K):
        local = tl.load(ids_ptr + token * TOP_K + k) - first
        is_own = (local >= 0) & (local < NUM_LOCAL)
        for start in range(0, SIZE, WIDTH):
            at = start + columns
            total += tl.load(words_ptr + local * SIZE + at, mask=is_own & (at < SIZE), other=0)
    tl.store(out_ptr + token * WIDTH + columns, total)


def compute_experts(
    rig: rigs.Rig, rank: int, layer: int, ids: torch.Tensor, out: torch.Tensor
) -> None:
    """Add up the bytes of this rank's physical experts: ids (T, K), out (T, WIDTH) int32."""
    words = rig.layers[layer].tensors[0].flatten(1).view(torch.int32)
    local, size = words.shape
    _experts_kernel[(len(ids),)](
        ids, words, out, rank * local, local, size, TOP_K, WIDTH, num_warps=1
    )


def run_batches(
    rank: int, run_path: Path, seed: int, slot_memory: str, mistake: str
) -> tuple[list[str], tuple[Numbers, Numbers]]:
    """What this rank finds wrong, and its parts of all tokens."""
    os.environ["EMULATED_GPU_HOLDS"] = str(2 * seed + rank)
    rigs.search_briefly()
    config = rigs.CONFIG.replace(slot_memory=slot_memory, allow_ideal=False)
    setup = rigs.Setup(SHAPE, TokenView.SHARED, config)
    rig = rigs.device_rig(rank, run_path, setup, PATIENCE_NS, driver=open_driver(0))
    balancer, device = rig.balancer, torch.device("cuda", 0)
    rig.fabric.wait_at_least(SECONDS)
    balancer.warm_up()
    ids, small = (torch.from_numpy(each).to(device) for each in all_ids())
    out = torch.zeros((BATCHES, LAYERS, TOKENS, WIDTH), dtype=torch.int32, device=device)
    decoded, decode = small[0].clone(), out.new_zeros((DECODED, WIDTH))
    computed, handed_on = decode.clone(), decode.clone()
    told, beside = torch.empty(ids.shape, dtype=torch.int32).pin_memory(), torch.cuda.Stream()
    answers = torch.empty((BATCHES, *decode.shape), dtype=torch.int32).pin_memory()
    if mistake:
        MISTAKES[mistake]()

    def decode_batch() -> None:
        compute_experts(rig, rank, 0, balancer.route(0, decoded, 0), computed)
        balancer.receive()
        balancer.computed()
        in_stream(handed_on.copy_)(computed)  # as references do
        torch.mul(handed_on, 1, out=decode)

    decode_batch()  # what is captured is compiled
    graph, dispatched = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        decode_batch()
    balancer.end_loading()
    for batch in range(BATCHES):
        for layer in range(LAYERS):
            physical = balancer.route(layer, ids[batch, layer], TOKENS)
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                told[batch, layer].copy_(physical, non_blocking=True)
            dispatched.append(physical.clone())
            balancer.receive()
            compute_experts(rig, rank, layer, dispatched[-1], out[batch, layer])
            wait_for_host_copy(beside)
            balancer.computed()
        if batch == 0:  # as well as another small one, and memory that others have from then on
            balancer.route(0, decoded[1:], 0)
            balancer.computed()
            others = [out.new_zeros(decoded.shape) for _ in range(OTHERS)]
        if batch % DECODES_EVERY == DECODES_EVERY - 1:
            decoded.copy_(small[batch])
            graph.replay()
            answers[batch].copy_(decode, non_blocking=True)
    torch.cuda.synchronize()
    balancer.computed()
    rig.fabric.require_peers()
    sent = torch.stack(dispatched).cpu().view(told.shape)
    is_wrong = {
        "memory that belongs to others": bool(torch.stack(others).any()),
        "ids that the host was told": not torch.equal(sent, told),
        "loads that were recorded": recorded_loads(rig) != loads_of(ids.cpu().numpy()),
    }
    parts = out.cpu().numpy(), answers.numpy()
    return [what for what, wrong in is_wrong.items() if wrong], parts


def recorded_loads(rig: rigs.Rig) -> list[list[int]]:
    """Of each layer's experts, as this rank's recorder was told."""
    events = [event for event in rig.recorder.events if isinstance(event, dict)]
    return [event["expert_load"] for event in events]


def loads_of(ids: Numbers) -> list[list[int]]:
    """Of each layer's experts, from ids (B, layers, T, K)."""
    layers, experts = ids.reshape(-1, TOKENS * TOP_K), SHAPE.num_logical_experts
    return [np.bincount(each[each >= 0], minlength=experts).tolist() for each in layers]


def wait_for_host_copy(beside: torch.cuda.Stream) -> None:
    """The next layer's ids are written to the same memory."""
    torch.cuda.current_stream().wait_stream(beside)


def not_awaited() -> None:
    MicroBatch.receive = lambda *_: None


def awaited_elsewhere() -> None:
    """In a stream that is not that of the experts."""
    receive, elsewhere = MicroBatch.receive, torch.cuda.Stream()

    def received(self: MicroBatch, patience_ns: int) -> None:
        elsewhere.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(elsewhere):
            receive(self, patience_ns)

    MicroBatch.receive = received


def routed_before_experts() -> None:
    """In a stream that waits for ids alone: ranks hear that slots are free before they are."""
    route, elsewhere = DeviceBalancer.route, torch.cuda.Stream()

    def routed(self: DeviceBalancer, *args: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            return route(self, *args)
        with torch.cuda.stream(elsewhere):
            physical = route(self, *args)
        torch.cuda.current_stream().wait_stream(elsewhere)
        return physical

    DeviceBalancer.route = routed


def sent_before_planned() -> None:
    """The event that the side stream waits for is recorded before the plan that is sent."""
    plan = DeviceBalancer._plan

    def planned(self: DeviceBalancer, part: MicroBatch, *others: Any) -> None:
        part.side._forked.record()
        plan(self, part, *others)

    def entered(self: SideStream) -> None:
        self._forked.wait(self.stream)
        self._has_forked = True

    DeviceBalancer._plan = planned
    SideStream.__enter__ = entered


def sent_after_joined() -> None:
    """The event that the engine's stream waits for is recorded before experts are sent."""
    enter = SideStream.__enter__

    def entered(self: SideStream) -> None:
        enter(self)
        self._done.record(self.stream)

    SideStream.__enter__ = entered
    SideStream.__exit__ = lambda self, *_: None


def outcome_read_early() -> None:
    Page.is_done, Page.wait = True, lambda self: None
    Batches.stage_times = lambda self, page: np.zeros((page.used, len(Stage)), np.int64)


def ids_overwritten() -> None:
    globals()["wait_for_host_copy"] = lambda beside: None


def graph_keeps_old_memory() -> None:
    """Where ids went of batches of other sizes is given back, though a graph writes there."""
    room = MicroBatch.room

    def only_room(self: MicroBatch, topk_ids: torch.Tensor) -> torch.Tensor:
        if (topk_ids.shape, topk_ids.dtype) != self._fits:
            self._rooms.clear()
        return room(self, topk_ids)

    MicroBatch.room = only_room


MADE = (
    *(not_awaited, awaited_elsewhere, routed_before_experts, sent_before_planned),
    *(sent_after_joined, outcome_read_early, ids_overwritten, graph_keeps_old_memory),
)
MISTAKES: dict[str, Callable[[], None]] = {make.__name__: make for make in MADE}
