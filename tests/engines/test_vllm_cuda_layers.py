"""Layers of the vLLM adapter on GPUs: which batches are balanced, when, and who is left alone."""

import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.model_loader import reload
    from vllm.v1.worker import ubatching

    from tests.support import vllm_layers
    from tests.support.vllm_gpu import (
        NAMES,
        NUM_LOCAL,
        NUM_MASTERS,
        NUM_RANKS,
        NUM_SLOTS,
        SHAPE,
        build,
        forward_pass,
        fp8_config,
    )
    from ultraep_serve.engines.vllm import expert_tensors, load, model, stage
    from ultraep_serve.engines.vllm.expert_tensors import is_as_in_checkpoint
    from ultraep_serve.engines.vllm.kernel import with_slots
    from ultraep_serve.engines.vllm.new_weights import refuse_new_weights
    from ultraep_serve.engines.vllm.stage import BalancedStage, VllmFlow

from tests.support.experts import NUM_EXPERTS, TOP_K, Noting
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common import run as started
from ultraep_serve.engines.common.weights import ExpertWeights
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.types import Policy, TokenView

X = torch.ones(8, 4)
IDS, WEIGHTS = torch.zeros(8, TOP_K, dtype=torch.int32), torch.ones(8, TOP_K)


class Wrapped:
    """A stage that leaves ids and weights to its caller, as vLLM's does where none dispatches."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def prepare(self, a1: torch.Tensor, weights: Any, ids: torch.Tensor, *_: Any, **__: Any) -> Any:
        self.seen.append(("prepare", int(ids[0, 0])))
        return a1, None, None, None, None

    def prepare_async(self, *given: Any, **_: Any) -> Any:
        prepared = self.prepare(*given)
        return lambda: self.seen.append("hook"), lambda: self.seen.append("receiver") or prepared

    def finalize(self, *_: Any) -> None:
        self.seen.append("finalize")

    def finalize_async(self, *_: Any) -> Any:
        return lambda: self.finalize()


def flow_of(balancer: Noting, view: TokenView = TokenView.SHARED) -> VllmFlow:
    made: Any = VllmFlow(view)
    made.balancer = balancer
    return made


def test_batches_are_judged_by_all_ranks_tokens_and_captured_ones_not(balanced: Any) -> None:
    _, config = build(balanced)
    balancer = Noting(100)
    flow = flow_of(balancer, TokenView.OWN)
    with forward_pass(config, [300, 8, 1]):
        flow.route(0, IDS)
        balanced(stage, "is_capturing", lambda _: True)
        flow.route(1, IDS)
    assert balancer.seen == [("route", 0, 309, 0), ("route", 1, 0, 0)]


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
    *_, ids, weights = receiver()
    assert torch.equal(ids, IDS + 100)  # also where the wrapped stage leaves both to its caller
    assert torch.equal(weights, WEIGHTS)
    combined = made.finalize_async(X)
    assert balancer.seen[3:] == ["receiver", ("receive", number), ("experts done", number)]
    combined()
    assert balancer.seen[6:] == ["finalize"]


@pytest.mark.parametrize("is_async", [False, True])
def test_an_expert_kernel_that_nobody_knows_computes_when_copies_have_come(
    balanced: Any, is_async: bool
) -> None:
    """vLLM's own kernel object calls a stage, then experts, whatever class they are of.

    Tokens are computed once more behind all that, when the kernel may be entered again.
    """

    layer, config = build(balanced)
    balancer = Noting(100)
    weights = ExpertWeights(layer, expert_tensors.expert_parameters(layer))
    with set_current_vllm_config(config):
        made = with_slots(weights, 0, SHAPE, flow_of(balancer, TokenView.OWN))
    layer.quant_method.moe_kernel = made
    known, wrapped = type(made.fused_experts), Wrapped(balancer.seen)
    compute = lambda self, output, *_, **__: balancer.seen.append("experts") or output.zero_()  # noqa: E731
    made.fused_experts.__class__ = type("Unknown", (known,), {"apply": compute})
    for name in ("prepare", "prepare_async", "finalize", "finalize_async"):
        balanced(made.prepare_finalize.wrapped, name, getattr(wrapped, name))
    balanced(made.prepare_finalize.wrapped, "supports_async", lambda: is_async)
    x = torch.ones(8, vllm_layers.HIDDEN, dtype=torch.bfloat16)
    with forward_pass(config, [8, 8, 8]):
        layer.forward_modular(x, WEIGHTS, IDS)
    assert balancer.seen == [
        *(("route", 0, 24, 0), ("prepare", 100), *(["hook", "receiver"] if is_async else [])),
        *(("receive", 0), "experts", ("experts done", 0), "finalize", ("computed", 0)),
    ]


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
    return Mock(get_model=lambda: models[0])


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Layers that are balanced, by name; nobody balances them."""
    found: list[Any] = []

    def balance(config: Any, vllm_config: Any, layers: Any, *_: Any) -> Mock:
        found.extend(own.layer_name for own in layers)
        return Mock(copies_stay=False)

    monkeypatch.setattr(model, "balance", balance)
    monkeypatch.setattr(model, "_cache_bytes", lambda _: 0)
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


def test_unsupported_models_are_served_by_vllm_alone(
    balanced: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES[:1])
    layer = layer_of(balanced, NAMES[0], config)
    worker, kernel = worker_of(config, Model(layer)), layer.quant_method.moe_kernel
    layer.expert_map_manager.num_fused_shared_experts = 1
    monkeypatch.setattr(started, "_made", [SimpleNamespace(path=tmp_path)])
    model.take_over(BalanceConfig(on_unsupported="off"), worker, config)
    assert layer.quant_method.moe_kernel is kernel
    assert layer.global_num_experts == NUM_EXPERTS
    assert "do not fuse them" in (tmp_path / "unbalanced").read_text()  # for the sidecar


def test_batches_that_are_all_small_are_not_balanced_in_silence(balanced: Any) -> None:
    """What counts are the tokens of all three data-parallel ranks; before anything is loaded."""
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES[:1])
    for tokens, length, largest in ((85, 8192, 255), (8192, 40, 3 * 2 * 40)):
        config.scheduler_config.max_num_batched_tokens = tokens
        config.scheduler_config.max_num_seqs = 2
        described = SimpleNamespace(enable_sleep_mode=False, max_model_len=length)
        object.__setattr__(config, "model_config", described)
        with pytest.raises(UnsupportedError, match=f"choose --min-batch-tokens {largest} or less"):
            load.config_of(config)


class Loaded(torch.nn.Module):
    """A model of one layer, which loads what it is given for every logical expert."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.experts = layer

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        for (name, shard, expert), weight in weights:
            parameter = parameters[f"experts.{name}"]
            parameter.weight_loader(parameter, weight, name, shard, expert)


def by_layer(model: Loaded, weights: Any) -> None:
    """As most models of vLLM do, by the layer's own loader."""
    projections = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    named = [(f"{of[2]}.{projections[of[1]]}.weight", w) for of, w in weights]
    assert len(list(model.experts.load_weights(named))) == 3 * NUM_MASTERS


def by_reload(model: Loaded, weights: Any) -> None:
    reload.initialize_layerwise_reload(model)
    model.load_weights(weights)
    assert model.experts.w13_weight.shape[0] == NUM_MASTERS
    reload.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.bfloat16))


def loaded_model(balanced: Any, **options: Any) -> tuple[Loaded, Any]:
    """Rank 1's layer, balanced, with slots that hold 7 everywhere, and its masters' neighbours."""
    parallel = vllm_layers.parallel_of(1, NUM_RANKS, "allgather_reducescatter")
    recorded = lambda layer: reload.record_metadata_for_reloading(layer)  # noqa: E731
    layer, config = build(balanced, parallel=parallel, made=recorded, **options)
    weights = ExpertWeights(layer, expert_tensors.expert_parameters(layer))
    execution = model._Layers(config, VllmFlow(TokenView.OWN), None, [layer])  # type: ignore[arg-type]
    with set_current_vllm_config(config):
        execution.give_slots([weights], SHAPE)
    for parameter in weights.parameters:
        slots = torch.ones_like(parameter.data[:NUM_SLOTS], dtype=torch.float32).mul_(7)
        parameter.data = torch.cat([parameter.data, slots.to(parameter.dtype)])
    weights.hide_slots(NUM_MASTERS, execution.kernel)
    return Loaded(layer), weights


def of_experts(model: Loaded) -> Iterator[tuple[tuple[str, str, int], torch.Tensor]]:
    """Of every expert of the checkpoint, 100 + e in all its matrices."""
    layer = model.experts
    for expert in range(NUM_EXPERTS):
        matrix = torch.full((vllm_layers.INNER, vllm_layers.HIDDEN), 100.0 + expert).bfloat16()
        for name, shard in (("w13_weight", "w1"), ("w13_weight", "w3"), ("w2_weight", "w2")):
            yield (name, shard, expert), matrix.T if shard == "w2" else matrix
    assert layer.layer_name == NAMES[0]


@pytest.mark.parametrize(
    "load", [Loaded.load_weights, by_layer, by_reload], ids=["model", "layer", "reload"]
)
def test_new_weights_go_to_the_masters_of_their_rank(
    balanced: Any, load: Callable[[Loaded, Any], None]
) -> None:
    """Programs that train send weights by all of these ways; the kernel computes with them."""
    loaded, weights = loaded_model(balanced)
    kernel = loaded.experts.quant_method.moe_kernel
    load(loaded, of_experts(loaded))
    expected = 100.0 + NUM_MASTERS + torch.arange(NUM_MASTERS)
    for own in weights.parameters:
        assert torch.equal(own.data[:NUM_MASTERS].float().flatten(1).amin(1), expected)
        assert torch.equal(own.data[:NUM_MASTERS].float().flatten(1).amax(1), expected)
        assert (own.data[NUM_MASTERS:] == 7).all()
    weights.require_in_place()
    seen = []
    loaded.experts.quant_method.moe_kernel = kernel  # as vLLM calls it
    balanced(mk.FusedMoEKernelModularImpl, "apply", lambda _, **given: seen.append(given))
    loaded.experts.forward_modular(X, WEIGHTS, IDS)
    assert [
        seen[0][name] is own for name, own in zip(("w1", "w2"), weights.parameters, strict=True)
    ]
    assert seen[0]["global_num_experts"] == NUM_RANKS * NUM_LOCAL
    assert seen[0]["expert_map"].tolist() == [
        -1 if physical // NUM_LOCAL != 1 else physical % NUM_LOCAL
        for physical in range(NUM_RANKS * NUM_LOCAL)
    ]


def test_made_up_tokens_are_as_wide_as_the_models_and_padded_with_zeros(balanced: Any) -> None:
    """Weights may be wider, for DeepEP's low latency, and hold there what was in memory."""
    layer, config = build(balanced)
    layer.moe_config.hidden_dim_unpadded = width = vllm_layers.HIDDEN - 48
    loaded = model._described(BalanceConfig(), config, [layer], TokenView.OWN)
    given: list[torch.Tensor] = []
    layer.forward_modular = lambda x, *_: given.append(x) or x + 1
    execution = model._Layers(config, VllmFlow(TokenView.OWN), None, [layer])  # type: ignore[arg-type]
    out = execution.compute(layer, torch.ones(8, loaded.hidden_size), WEIGHTS, IDS)
    assert torch.equal(out, torch.full((8, width), 2.0))
    assert given[0].shape == (8, vllm_layers.HIDDEN)
    assert not given[0][:, width:].any()


def test_programs_find_a_layer_as_vllm_made_it(balanced: Any) -> None:
    """What saves, compares or sends weights must not see copies, which change with prompts."""
    loaded, weights = loaded_model(balanced)
    plain, _ = build(balanced)
    seen = {name: tensor.shape for name, tensor in loaded.state_dict().items()}
    assert seen == {f"experts.{name}": own.shape for name, own in plain.state_dict().items()}
    assert not any((own == 7).any() for _, own in loaded.named_parameters())
    layer = loaded.experts
    assert layer.global_num_experts == layer.moe_config.num_experts == NUM_EXPERTS
    assert layer.expert_map.tolist() == [-1] * 4 + [0, 1, 2, 3] + [-1] * 4
    for name, own in zip(("w13_weight", "w2_weight"), weights.parameters, strict=True):
        shown = getattr(layer, name)
        assert (type(shown), vars(shown)) == (type(own), vars(own))
        assert shown.data_ptr() == own.data_ptr()


def test_weights_that_a_kernel_keeps_otherwise_are_refused_before_anything_moves(
    balanced: Any,
) -> None:
    loaded, weights = loaded_model(balanced, quant_config=fp8_config("dynamic", None))
    assert not is_as_in_checkpoint(loaded.experts)
    refuse_new_weights(loaded, [loaded.experts])
    before = {name: own.clone() for name, own in loaded.state_dict().items()}
    shown = loaded.experts.w13_weight
    for load in (
        lambda: loaded.load_weights(of_experts(loaded)),
        lambda: list(loaded.experts.load_weights([("4.gate_proj.weight", torch.ones(1))])),
        lambda: shown.weight_loader(shown, torch.ones(1), "w13_weight", "w1", 4),
        lambda: by_reload(loaded, ()),
    ):
        with pytest.raises(UnsupportedError, match="which serves on with those it has") as refused:
            load()
        assert "on_unsupported" not in str(refused.value)
    assert all(torch.equal(own, before[name]) for name, own in loaded.state_dict().items())
    weights.require_in_place()


def test_buffers_that_other_layers_dispatch_through_stay(balanced: Any) -> None:
    """Main and draft model share DeepEP's, which are made for a number of experts."""
    destroyed: list[str] = []

    def kernel(buffer: Any) -> Any:
        return SimpleNamespace(prepare_finalize=SimpleNamespace(buffer=buffer))

    def of(name: str) -> Any:
        return SimpleNamespace(destroy=lambda: destroyed.append(name))

    logical, physical = of("logical"), of("physical")
    own, draft = (torch.nn.Module() for _ in range(2))
    own.quant_method, draft.quant_method = SimpleNamespace(), SimpleNamespace()
    for every, expected in (([own, draft], []), ([own], ["logical"])):
        execution = model._Layers(None, None, None, every)  # type: ignore[arg-type]
        own.quant_method.moe_kernel = kernel(physical)
        draft.quant_method.moe_kernel = kernel(logical)
        execution._plain = {own: kernel(logical)}
        execution.keep_slots()
        assert destroyed == expected
        execution._plain = {own: draft.quant_method.moe_kernel}
        execution.take_slots([], SHAPE)
        assert own.quant_method.moe_kernel is draft.quant_method.moe_kernel
        assert destroyed == [*expected, "physical"]
        destroyed.clear()


def test_weights_loaded_in_place_are_balanced_and_others_refused(balanced: Any) -> None:
    """Before the next batch, whichever of vLLM's ways of loading weights anew it was."""
    layer, _ = build(balanced)
    method = layer.quant_method
    held = ExpertWeights(layer, list(layer.parameters()))
    held.hide_slots(NUM_MASTERS, lambda layer: method.moe_kernel)
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
