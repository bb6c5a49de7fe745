"""Samples in service find every kind of fault and switch all ranks off; nothing else does."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.faults import FAULTS, Fault
from tests.support.ranks import run_ranks
from tests.support.sampled_ranks import HIDDEN, LAYERS, SampledRank, Traffic, serve_traffic
from ultraep_serve.proof.samples import SampleTurns
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.types import ExpertShape, Policy, TokenView, VerificationCheck

SHAPE = ExpertShape(3, 9, 2)
# Batches until a fault is found. Answers are checked in every eighth layer, which comes to each of
# the three in 24; only in some of them the last rank has copies.
MOST = dict.fromkeys(VerificationCheck, 1) | {VerificationCheck.ANSWERS: 9}


def batches_until_off(server: SampledRank, fault: Fault, most: int) -> int:
    """How many batches served with ``fault`` until all ranks are off; ``most`` + 1: they are not.

    The batch that ends it is off; what was found, was found before.
    """
    for batch in range(1, most + 1):
        with pytest.MonkeyPatch.context() as patch:
            if fault.on_all_ranks or server.rank == SHAPE.num_ranks - 1:
                fault.put(server.state, patch)
            server.serve()
        dist.barrier()
        doubted = server.page.is_in_doubt or server.joined.balancer._samples.is_in_doubt
        anybody = torch.tensor([int(doubted)])
        dist.all_reduce(anybody)
        if anybody:
            return batch
    return most + 1


def serve_with_faults(rank: int, run_path: Path, view: TokenView) -> dict[str, Any]:
    """For each fault: batches until it is found, what found it, and what is in force then."""
    server = SampledRank(rank, run_path, view, verify_every=1, slot_memory="shared")
    server.serve(3)
    assert not server.page.is_in_doubt
    outcomes: dict[str, Any] = {"none": server.found()}
    for fault in FAULTS:
        batches = batches_until_off(server, fault, most=MOST[fault.found_by])
        server.serve()
        outcomes[fault.name] = batches, server.found(), server.page.is_in_doubt, server.page.policy
        server.switch_on()
        server.serve()
        assert not server.page.is_in_doubt, fault.name
    return outcomes


@pytest.mark.parametrize("view", list(TokenView))
def test_every_fault_switches_all_ranks_off(run_path: Path, view: TokenView) -> None:
    outcomes = run_ranks(serve_with_faults, 3, run_path, view)
    assert len(FAULTS) >= 12
    for outcome in outcomes:
        assert outcome.pop("none") == set()
        for fault in FAULTS:
            batches, found, in_doubt, policy = outcome[fault.name]
            most = MOST[fault.found_by]
            seen = fault.name, batches, found
            assert batches <= most, seen
            assert in_doubt, seen
            assert policy is Policy.OFF, seen
            assert fault.found_by.name.lower() in found, seen


def serve_rarely_checked(rank: int, run_path: Path) -> tuple[int, dict[str, Any], Any]:
    server = SampledRank(rank, run_path, TokenView.OWN, verify_every=7, slot_memory="shared")
    fault = FAULTS[0]
    batches = batches_until_off(server, fault, most=7)
    server.serve()
    report = server.files.verification(2)
    dist.barrier()
    content = json.loads(report.read_text())
    server.joined._recorder.close()
    with contextlib.closing(RingReader(server.files.ring(rank))) as ring:
        return batches, content, ring.header()


def test_a_fault_is_found_after_as_many_batches_as_layers_lie_between_samples(
    run_path: Path,
) -> None:
    outcomes = run_ranks(serve_rarely_checked, 3, run_path)
    batches, report, _ = outcomes[0]
    assert 1 < batches <= 3
    assert report["check"] == "slots"
    assert report["rank"] == 2
    assert report["shape"]["num_logical_experts"] == 9
    assert report["tensors"][0] == {"dtype": "torch.float32", "shape": [5, HIDDEN, HIDDEN]}
    assert "torch" in report["versions"]
    assert str(run_path) not in json.dumps(report)
    headers = [header for _, _, header in outcomes]
    assert all(sum(header.verified_layers) >= 2 for header in headers)
    assert [sum(header.verification_failures) for header in headers][:2] == [0, 0]
    assert headers[2].verification_failures[VerificationCheck.SLOTS] >= 1
    assert all(header.policy is Policy.OFF for header in headers)


@pytest.mark.parametrize(("every", "layers"), [(1, 4), (6, 4), (512, 12), (512, 1), (2, 3)])
def test_samples_take_all_layers_in_turn(every: int, layers: int) -> None:
    turns = SampleTurns(every, layers)
    taken = [turns.next(i % layers) for i in range(40 * (every + layers) * layers)]
    numbers = [i for i, sample in enumerate(taken) if sample is not None]
    assert set(np.diff(numbers)) <= {every, every + 1, every + 2, every + 3}
    assert {i % layers for i in numbers[:layers]} == set(range(layers))
    with_answers = [s.layer for s in taken if s is not None and s.with_answers]
    assert set(with_answers[: 3 * layers]) == set(range(layers))


def serve_with_stale_copies(rank: int, run_path: Path) -> tuple[bool, set[str], bool]:
    """Whether copies stayed, what samples found when masters changed unseen, and in doubt after."""
    server = SampledRank(rank, run_path, TokenView.OWN, verify_every=1)
    server.serve(6)
    slots = server.state.balancer._residents[0].slot_expert
    stayed = not server.page.is_in_doubt and bool((slots >= 0).any())
    for layer in server.layers:
        layer[0][: SHAPE.num_masters] *= -1
    dist.barrier()
    server.serve(2)
    found = server.found()
    server.switch_on()
    server.serve(3)
    return stayed, found, server.page.is_in_doubt


def test_copies_that_are_older_than_their_masters_are_found_and_forgotten(run_path: Path) -> None:
    for outcome in run_ranks(serve_with_stale_copies, 3, run_path):
        assert outcome == (True, {"slots"}, False)


def serve_without_samples(rank: int, run_path: Path) -> int:
    server = SampledRank(rank, run_path, TokenView.OWN, verify_every=0)
    before = server.joined.balancer._fabric.epoch
    server.serve()
    epochs: int = server.joined.balancer._fabric.epoch - before
    return epochs


def test_without_samples_nothing_is_exchanged_for_them(run_path: Path) -> None:
    assert run_ranks(serve_without_samples, 3, run_path) == [LAYERS] * 3


@pytest.mark.parametrize(
    "traffic",
    [
        Traffic(TokenView.SHARED, ExpertShape(2, 8, 2), torch.bfloat16, 150),
        Traffic(TokenView.SHARED, ExpertShape(2, 8, 2), torch.bfloat16, 50, slot_memory="shared"),
        Traffic(TokenView.OWN, ExpertShape(4, 12, 1), torch.int8, 50, domain_size=2),
        Traffic(
            TokenView.SHARED, ExpertShape(2, 8, 2), torch.float16, 50, factor=500.0
        ),  # overflow
    ],
    ids=str,
)
def test_nothing_is_found_where_nothing_is_wrong(run_path: Path, traffic: Traffic) -> None:
    for verified, found in run_ranks(serve_traffic, traffic.shape.num_ranks, run_path, traffic):
        assert found == set()
        assert min(verified) > 0
