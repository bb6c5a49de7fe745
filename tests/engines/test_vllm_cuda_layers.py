"""Layers of the vLLM adapter on GPUs: which batches are balanced, when, and who is left alone."""

import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.v1.worker import ubatching

    from tests.support import vllm_layers
    from tests.support.vllm_gpu import NAMES, NUM_RANKS, build, forward_pass
    from ultraep_serve.engines.vllm import model, stage
    from ultraep_serve.engines.vllm.stage import BalancedStage, Flow

from tests.support.experts import NUM_EXPERTS, TOP_K, Noting
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common import group
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.types import Policy, TokenView

X = torch.ones(8, 4)
IDS, WEIGHTS = torch.zeros(8, TOP_K, dtype=torch.int32), torch.ones(8, TOP_K)


class Wrapped:
    """A stage that leaves ids and weights to its caller, as vLLM's does where none dispatches."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def prepare(self, a1: torch.Tensor, weights: Any, ids: torch.Tensor, *_: Any) -> Any:
        self.seen.append(("prepare", int(ids[0, 0])))
        return a1, None, None, None, None

    def prepare_async(self, *given: Any) -> Any:
        prepared = self.prepare(*given)
        return lambda: self.seen.append("hook"), lambda: self.seen.append("receiver") or prepared

    def finalize(self, *_: Any) -> None:
        self.seen.append("finalize")

    def finalize_async(self, *_: Any) -> Any:
        return lambda: self.finalize()


def flow_of(balancer: Noting, view: TokenView = TokenView.SHARED, **options: Any) -> Flow:
    made: Any = Flow(view, **options)
    made.balancer = balancer
    return made


def test_batches_are_judged_by_all_ranks_tokens_and_captured_ones_not(balanced: Any) -> None:
    _, config = build(balanced)
    balancer = Noting(100)
    flow = flow_of(balancer, TokenView.OWN)
    with forward_pass(config, [300, 8, 1]):
        flow.route(0, WEIGHTS, IDS)
        balanced(stage, "is_capturing", lambda _: True)
        flow.route(1, WEIGHTS, IDS)
    assert balancer.seen == [("route", 0, 309, 0), ("route", 1, 0, 0)]


def test_a_kernel_gets_physical_ids_when_their_experts_have_come() -> None:
    """Also where the wrapped stage leaves ids and weights to the caller, who has logical ones."""
    balancer = Noting(100)
    made: Any = BalancedStage(Wrapped(balancer.seen), 3, flow_of(balancer))
    *_, ids, weights = made.prepare(X, WEIGHTS, IDS, 12, None, False, None)
    assert torch.equal(ids, IDS + 100)
    assert torch.equal(weights, WEIGHTS)
    made.finalize(X)
    assert balancer.seen == [
        *(("route", 3, 8, 0), ("prepare", 100), ("receive", 0)),
        *(("clock stops", 0), "finalize", ("computed", 0)),
    ]


@pytest.mark.parametrize("number", [0, 1])
def test_asynchronous_halves_end_in_their_receivers(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """vLLM runs overlapping micro-batches in threads of their own, which take turns in a layer."""
    balancer = Noting(100)
    made: Any = BalancedStage(Wrapped(balancer.seen), 3, flow_of(balancer))
    contexts = {threading.get_ident(): number}
    monkeypatch.setattr(ubatching, "_THREAD_ID_TO_CONTEXT", contexts)
    hook, receiver = made.prepare_async(X, WEIGHTS, IDS, 12, None, False, None)
    hook()
    assert balancer.seen == [("route", 3, 8, number), ("prepare", 100), "hook"]
    *_, ids, _ = receiver()
    assert torch.equal(ids, IDS + 100)
    combined = made.finalize_async(X)
    assert balancer.seen[3:] == ["receiver", ("receive", number), ("clock stops", number)]
    combined()
    assert balancer.seen[6:] == ["finalize", ("computed", number)]


def test_zero_experts_are_no_load() -> None:
    """A chosen expert that computes nothing comes as expert 0 with weight 0, and goes there."""
    balancer = Noting(100)
    ids, weights = torch.tensor([[3, 0]], dtype=torch.int32), torch.tensor([[0.5, 0.0]])
    assert flow_of(balancer).route(0, weights, ids).tolist() == [[103, 100]]
    known = flow_of(balancer, has_zero_experts=True)
    assert known.route(0, weights, ids).tolist() == [[103, 0]]


def test_an_expert_kernel_that_nobody_knows_cannot_compute_before_copies_have_come(
    balanced: Any,
) -> None:
    """vLLM's own kernel object calls a stage, then experts, whatever class they are of."""

    layer, config = build(balanced)
    balancer, kernel = Noting(100), layer.quant_method.moe_kernel
    known = type(kernel.fused_experts)
    compute = lambda self, output, *_, **__: balancer.seen.append("experts") or output.zero_()  # noqa: E731
    kernel.fused_experts.__class__ = type("Unknown", (known,), {"apply": compute})
    own = BalancedStage(kernel.prepare_finalize, 0, flow_of(balancer, TokenView.OWN))
    kernel.impl.prepare_finalize = own
    x = torch.ones(8, vllm_layers.HIDDEN, dtype=torch.bfloat16)
    balancer.route = lambda layer, ids, tokens, number: balancer.seen.append("route") or ids
    balanced(own.wrapped, "prepare", lambda x, *_, **__: (x, None, None, None, None))
    balanced(own.wrapped, "finalize", lambda *_, **__: balancer.seen.append("finalize"))
    with forward_pass(config, [8, 8, 8]):
        layer.forward_modular(x, WEIGHTS, IDS)
    expected = ["route", ("receive", 0), "experts", ("clock stops", 0), "finalize", ("computed", 0)]
    assert balancer.seen == expected


class Model(torch.nn.Module):
    """A model that vLLM has loaded: its runners of ``layers``, as far as they are looked at."""

    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.runners = torch.nn.ModuleList(MoERunner.__new__(MoERunner) for _ in layers)
        for runner, layer in zip(self.runners, layers, strict=True):
            torch.nn.Module.__init__(runner)
            vars(runner).update(router=None, layer_name=layer.layer_name)
            runner.routed_experts, runner._shared_experts = layer, None


def worker_of(config: Any, *models: Model) -> Any:
    """A worker with the first of ``models``; the others are draft models, loaded with it."""
    runners = [runner for loaded in models for runner in loaded.runners]
    names = [runner.layer_name for runner in runners]
    compilation = config.compilation_config
    compilation.static_all_moe_layers[:] = names
    compilation.static_forward_context.update(zip(names, runners, strict=True))
    described = SimpleNamespace(model="some/model", architectures=["Some"])
    object.__setattr__(config, "model_config", described)
    return SimpleNamespace(get_model=lambda: models[0])


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Layers that are balanced, by name; nobody balances them."""
    found: list[Any] = []
    monkeypatch.setattr(
        model,
        "_balance",
        lambda config, worker, vllm_config, runners: found.extend(r.layer_name for r in runners),
    )
    return found


def layer_of(balanced: Any, name: str, config: Any) -> Any:
    layer, _ = build(balanced, config=config)
    layer.layer_name = name
    return layer


def test_draft_models_go_without_balancing(
    balanced: Any, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they run as the engine has them; on a CPU their experts are ours too."""
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES[:1])
    own, draft = (Model(layer_of(balanced, name, config)) for name in ("own", "draft"))
    worker, computed = worker_of(config, own, draft), []
    model.take_over(BalanceConfig(), worker, config)
    assert taken == ["own"]
    taken.clear()
    monkeypatch.setattr(model, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.setattr(
        model, "put_in_kernels", lambda layers, _: computed.extend(own.layer_name for own in layers)
    )
    model.take_over(BalanceConfig(policy=Policy.OFF), worker, config)
    assert (computed, taken) == (["own", "draft"], [])
    model.take_over(BalanceConfig(), worker, config)
    assert taken == ["own"]
    entries = {runner._forward_entry for of in (own, draft) for runner in of.runners}
    assert entries == {torch.ops.vllm.moe_forward}  # which compiled models see as one node


def test_models_without_experts_are_refused(balanced: Any) -> None:
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES[:1])
    with pytest.raises(UnsupportedError, match=r"some/model has no experts that vLLM routes"):
        model.take_over(BalanceConfig(), worker_of(config, Model()), config)


def test_unsupported_models_are_served_by_vllm_alone(balanced: Any, tmp_path: Path) -> None:
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES[:1])
    layer = layer_of(balanced, NAMES[0], config)
    worker, kernel = worker_of(config, Model(layer)), layer.quant_method.moe_kernel
    config.parallel_config.enable_elastic_ep = True
    plain = BalanceConfig(on_unsupported="off", run_dir=str(tmp_path))
    model.take_over(plain, worker, config)
    assert layer.quant_method.moe_kernel is kernel
    assert layer.global_num_experts == NUM_EXPERTS
    assert "--enable-elastic-ep" in (tmp_path / "unbalanced").read_text()  # for the sidecar


def test_batches_that_are_all_small_are_not_balanced_in_silence(
    balanced: Any, tmp_path: Path
) -> None:
    """What counts are the tokens of all three data-parallel ranks."""
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES[:1])
    layer = layer_of(balanced, NAMES[0], config)
    worker = worker_of(config, Model(layer))
    balanced(model.get_world_group(), "cpu_group", SimpleNamespace(get_group_store=lambda: None))
    plain = BalanceConfig(on_unsupported="off", run_dir=str(tmp_path))
    for tokens, length, largest in ((85, 8192, 255), (8192, 40, 3 * 2 * 40)):
        config.scheduler_config.max_num_batched_tokens = tokens
        config.scheduler_config.max_num_seqs = 2
        described = SimpleNamespace(enable_sleep_mode=False, max_model_len=length)
        object.__setattr__(config, "model_config", described)
        with pytest.raises(UnsupportedError, match=f"choose --min-batch-tokens {largest} or less"):
            model.take_over(BalanceConfig(), worker, config)
        model.take_over(plain, worker, config)
        assert f"has {largest} over all ranks" in (tmp_path / "unbalanced").read_text()


def test_weights_loaded_in_place_are_balanced_and_others_refused(balanced: Any) -> None:
    """Before the next batch, whichever of vLLM's ways of loading weights anew it was."""
    layer, _ = build(balanced)
    method = layer.quant_method
    held = group.BalancedLayers.__new__(group.BalancedLayers)
    held._layers = [list(layer.parameters())]
    held.hold([layer], lambda layer: method.moe_kernel)
    layer.w13_weight.data.fill_(2)
    held.require_in_place()
    weight, kernel = layer.w13_weight, method.moe_kernel
    layer.w13_weight = torch.nn.Parameter(weight.data.clone(), requires_grad=False)
    with pytest.raises(UnsupportedError, match="its weights were replaced after loading"):
        held.require_in_place()
    layer.w13_weight = weight
    held.require_in_place()
    method.moe_kernel = mk.FusedMoEKernel(kernel.prepare_finalize, kernel.fused_experts)
    with pytest.raises(UnsupportedError, match="its weights were replaced after loading"):
        held.require_in_place()
