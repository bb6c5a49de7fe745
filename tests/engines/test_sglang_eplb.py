"""Comparators are what SGLang makes: `eplb` of its experts, Waterfill of its shared expert."""

import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from tests.support.eplb_cases import SLOTS, Case, assert_same, made_up, recorded
from tests.support.interpreter import interpreted
from tests.support.real_traces import needs_real_traces
from ultraep_lab.comparators.waterfill import waterfill

torch = pytest.importorskip("torch")
deepseek = pytest.importorskip(
    "sglang.srt.eplb.eplb_algorithms.deepseek", reason="SGLang's EPLB needs SGLang"
)


@pytest.mark.parametrize("cases", [made_up, pytest.param(recorded, marks=needs_real_traces)])
def test_eplb_is_what_the_engine_makes(cases: Callable[[], Iterable[Case]]) -> None:
    for weight, ranks in cases():
        made, _, _ = deepseek.rebalance_experts(
            torch.tensor(weight)[None], weight.size + ranks * SLOTS, 1, 1, ranks, False
        )
        assert_same(weight, ranks, np.asarray(made[0]))


DRAWN = """
import sys
import numpy as np
import torch
from sglang.kernels.ops.moe.deepep_waterfill_kernels import materialize_waterfill_dispatch_fused
chosen, load, source = np.load(sys.argv[1]).values()
expanded, _ = materialize_waterfill_dispatch_fused(
    torch.tensor(chosen), torch.ones(chosen.shape), torch.tensor(load), 32, load.size, int(source),
    1.0, allow_all_ranks=True,
)
print(*np.bincount(expanded[:, -1].numpy() // (32 // load.size + 1), minlength=load.size))
"""


def test_waterfill_sends_as_many_as_the_engine(tmp_path: Path) -> None:
    """SGLang draws a rank for each token, so that numbers agree within 3 % of the tokens."""
    rng, ranks, source = np.random.default_rng(0), 8, 3
    chances = rng.dirichlet(np.full(32, 0.5))
    chosen = np.stack([rng.choice(32, 4, replace=False, p=chances) for _ in range(2048)])
    routed, tokens = np.zeros((ranks, ranks), np.int64), np.zeros(ranks, np.int64)
    routed[source] = np.bincount(chosen.ravel() // 4, minlength=ranks)
    tokens[source] = len(chosen)
    np.savez(tmp_path / "routed.npz", chosen=chosen, load=routed[source], source=source)
    command = interpreted(["-c", DRAWN, str(tmp_path / "routed.npz")])
    drawn = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    theirs = np.array(drawn.stdout.split(), np.int64)
    ours = waterfill(routed, tokens)[source]
    assert ours.sum() == theirs.sum() == len(chosen)
    assert np.abs(ours - theirs).max() <= 0.03 * len(chosen)
    assert np.ptp(ours) > 0.1 * len(chosen)
