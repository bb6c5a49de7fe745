"""The engines' own expert kernels on L + S experts, of which S are copies in slots.

experts.py FOUND torch|vllm|sglang

For each kernel and format: tokens of all ranks by their masters alone (slots hold NaN), then with
experts copied and ids rerouted. Both are compared with float64 and with each other; then both are
one CUDA graph, in which experts are copied in a side stream while masters compute.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[1] / "device")]

import torch  # noqa: E402
from expert_layer import (  # noqa: E402
    Compute,
    ExpertKernel,
    Masters,
    Sizes,
    each_expert,
    kernel_layer,
    make_masters,
)
from report import Report  # noqa: E402
from routes import make_routes  # noqa: E402
from virtual_layer import Balanced, balance  # noqa: E402

from tests.support.bench import Bench  # noqa: E402
from tests.support.kernel_checks import require_ok  # noqa: E402
from tests.support.virtual_ranks import VirtualRanks, require_arrived, sender  # noqa: E402
from ultraep_serve.balance.physical import identity_table, master_ids  # noqa: E402
from ultraep_serve.types import ExpertShape  # noqa: E402

CANNOT_RUN = 77
FULL = Sizes(ExpertShape(4, 32, 2), 1024, 1024, 256, 4)  # up to 512 vLLM takes Triton for DeepGEMM
TINY = Sizes(ExpertShape(2, 6, 1), 128, 128, 24, 2)
# relative, of a token's output against float64; FP8 rounds activations too
LARGEST_ERROR = {"bf16": 2e-2, "fp8-block": 1e-1, "fp8-channel": 1e-1}
IMBALANCE = 1.5
LARGEST_DIFFERENCE = 2e-2  # of a token with and without copies: sums in another order, in bfloat16
NumberedIds = tuple[torch.Tensor, torch.Tensor]


def main() -> None:
    """One row per kernel; a kernel that this machine lacks is a row that says so."""
    found, library = sys.argv[1:]
    report, bench = Report(Path(found)), Bench()
    sizes = TINY if bench.interpreted else FULL
    module = importlib.import_module(f"kernels_{library}")
    with module.ready(bench.device):
        offered = module.kernels(sizes, bench.device)
        for kernel in offered:
            if isinstance(kernel, str):
                report.add({"what": kernel, "passed": True, "checked": "nothing"})
            else:
                what = f"{kernel.name}, {kernel.format}"
                report.run(what, check_kernel, bench, sizes, kernel)
    if all(isinstance(kernel, str) for kernel in offered):
        print("; ".join(map(str, offered)) or f"{library} offers no kernel here")
        sys.exit(CANNOT_RUN)
    sys.exit(not report.all_passed)


def check_kernel(bench: Bench, sizes: Sizes, kernel: ExpertKernel) -> dict[str, Any]:
    """Answers with copies against answers without, launched and in a graph."""
    shape, device = sizes.shape, bench.device
    masters = make_masters(sizes, kernel.format, device)
    ranks, computes = kernel_layer(sizes, kernel, masters, device)
    routes = make_routes(shape, sizes.tokens, sizes.top_k, IMBALANCE, device)
    ids = routes.ids.view(-1, sizes.top_k)
    x, weights = make_tokens(sizes, device)
    places = shape.num_logical_experts, shape.num_ranks, shape.num_replica_slots
    at_home = master_ids(ids, torch.from_numpy(identity_table(*places)).to(device)).int()
    layer = added(computes, x, weights)
    off = layer(at_home)  # slots hold NaN: nobody reads them
    balanced = balance(bench, ranks, routes.ids)
    copies = int((balanced.physical % shape.num_local >= shape.num_masters).sum())
    assert copies, "no assignment was rerouted to a copy"
    on = layer(balanced.physical)
    exact = reference(masters, x, weights, ids)
    errors = {
        "largest_error_off": largest_error(off, exact),
        "largest_error_on": largest_error(on, exact),
    }
    difference = largest_error(on, off)
    captured = in_graph(bench, ranks, balanced, layer, at_home)
    errors |= {"largest_error_in_graph": largest_error(captured[1], exact)}
    beside = largest_error(captured[0], off)
    for name, error in errors.items():
        assert error <= LARGEST_ERROR[kernel.format], f"{name} {error:.1e}"
    for name, error in (("with copies", difference), ("beside copies", beside)):
        assert error <= LARGEST_DIFFERENCE, f"{name}: differs by {error:.1e}"
    return {
        "checked": "float64; with and without copies; in a CUDA graph, beside a side stream",
        "assignments_to_copies": copies,
        **errors,
        "largest_difference": difference,
        "bitwise_equal": torch.equal(on, off),
        "graph_bitwise_equal": torch.equal(captured[1], on),
    }


def make_tokens(sizes: Sizes, device: torch.device) -> NumberedIds:
    """Hidden states (N, H) bfloat16, and weights (N, K) float32 that add up to 1."""
    generator = torch.Generator(device).manual_seed(1)
    tokens = sizes.shape.num_ranks * sizes.tokens
    x = torch.randn((tokens, sizes.hidden), generator=generator, device=device).bfloat16()
    scores = torch.randn((tokens, sizes.top_k), generator=generator, device=device)
    return x, scores.softmax(dim=1)


def added(
    computes: list[Compute], x: torch.Tensor, weights: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    """All ranks' outputs together, float32, for physical ids."""

    def run(physical: torch.Tensor) -> torch.Tensor:
        # kernels may write into what they are given
        parts = [compute(x.clone(), weights, physical.clone()).float() for compute in computes]
        return torch.stack(parts).sum(0)

    return run


def in_graph(
    bench: Bench,
    ranks: VirtualRanks,
    balanced: Balanced,
    layer: Callable[[torch.Tensor], torch.Tensor],
    at_home: torch.Tensor,
) -> NumberedIds:
    """Outputs by masters beside the copies, and with copies behind them, of a replayed graph."""
    send = sender(bench, ranks, balanced.slots, balanced.sends)

    def both() -> NumberedIds:
        if bench.plain:
            send()
            return layer(at_home), layer(balanced.physical)
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            send()
        first = layer(at_home)
        current.wait_stream(side)
        return first, layer(balanced.physical)

    replay = bench.capture(both)
    ranks.empty_slots()
    ranks.flags.zero_()
    results = replay()
    require_ok(ranks.reach.status)
    require_arrived(ranks, balanced.slots, balanced.sends[0].epoch)
    return results


def reference(
    masters: list[Masters], x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """(N, H) float64 for logical ``ids``."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert, gate_up, down in each_expert(masters):
        token, choice = torch.nonzero(ids == expert, as_tuple=True)
        gate, up = (x[token].double() @ gate_up.T).chunk(2, dim=-1)
        computed = (torch.nn.functional.silu(gate) * up) @ down.T
        out.index_add_(0, token, computed * weights[token, choice, None].double())
    return out


def largest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, of the token (N, H) that is furthest off; not a number where one is not."""
    apart = (found.double() - expected.double()).norm(dim=-1)
    return float((apart / expected.double().norm(dim=-1)).max())


if __name__ == "__main__":
    main()
