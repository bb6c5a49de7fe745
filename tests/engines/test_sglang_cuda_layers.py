"""Layers of SGLang on GPUs: told of slots, planned or not, loaded anew; one process."""

import os
import signal
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: deploy/setup_sglang_cpu.py")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when SGLang has it compile
    from tests.support import sglang_fakes as fakes  # has what SGLang looks for

    # isort: split
    from sglang.srt.layers.dp_attention import get_is_extend_in_batch
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.managers import io_struct
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.models.transformers import TransformersFusedMoE
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.utils import kill_process_tree

    from ultraep_serve.engines.sglang import hooks, model
    from ultraep_serve.engines.sglang.stage import PrefillTokens, SglangFlow, balance_dispatch

from tests.support.experts import NUM_EXPERTS, TOP_K, Noting
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common import group
from ultraep_serve.engines.common import run as started
from ultraep_serve.engines.common.weights import ExpertWeights
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.system import refusals
from ultraep_serve.types import Policy

SHAPE = fakes.SHAPE


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.pretend_gpu(monkeypatch.setattr)
    monkeypatch.setattr(group, "require_agreement", lambda *_: None)  # with no other rank
    for module in (model, group):
        monkeypatch.setattr(module, "unanimous", lambda *_: nullcontext())


# Slots


@pytest.mark.parametrize("changes", [{}, fakes.DEEPEP])
def test_layers_are_told_of_slots_and_told_back(changes: dict[str, Any]) -> None:
    layer = fakes.loaded_layer(**changes)
    quant_config, parameters = layer.dispatcher.quant_config, model.movable_parameters(layer)
    experts = fakes.layers_of()
    weights = [ExpertWeights(layer, parameters)]
    experts.give_slots(weights, SHAPE)
    assert told(layer) == {(SHAPE.num_ranks * SHAPE.num_local, SHAPE.num_local)}
    assert layer.runner.config is layer.quant_method.moe_runner_config is layer.moe_runner_config
    for parameter in parameters:
        parameter.data = parameter.data.new_zeros(SHAPE.num_local, *parameter.shape[1:])
    assert model.movable_parameters(layer) == parameters
    for parameter in parameters:
        parameter.data = parameter.data[: SHAPE.num_masters]
    experts.take_slots(weights, SHAPE)
    assert told(layer) == {(NUM_EXPERTS, SHAPE.num_masters)}
    assert layer.w13_weight.shape[0] == SHAPE.num_masters
    assert layer.dispatcher.quant_config == quant_config


def told(layer: FusedMoE) -> set[tuple[int, int]]:
    """The numbers of experts, all and local, that everything of the layer knows."""
    inner = getattr(layer.dispatcher, "_inners", [layer.dispatcher])
    modes = ("_normal_dispatcher", "_low_latency_dispatcher")
    parts = [getattr(dispatcher, mode, dispatcher) for dispatcher in inner for mode in modes]
    known = {(part.num_experts, part.num_local_experts) for part in [*parts, layer.runner.config]}
    assert layer.num_local_experts in {local for _, local in known}
    return known


def test_flashinfers_activation_knows_the_slots() -> None:
    layer = fakes.loaded_layer(moe_runner_backend="flashinfer_cutlass")
    layer.moe_runner_config.swiglu_limit = 7.0
    weights = ExpertWeights(layer, model.movable_parameters(layer))
    fakes.layers_of().give_slots([weights], SHAPE)
    assert [tensor.numel() for tensor in layer._cutlass_swiglu_params] == [SHAPE.num_local] * 3


def test_measuring_computes_as_in_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more tokens at once than DeepEP's buffer holds."""
    monkeypatch.setenv("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "16")
    layer = fakes.loaded_layer(**fakes.DEEPEP, deepep_mode="low_latency")
    sizes: list[tuple[int, bool]] = []
    extending = get_is_extend_in_batch
    layer.forward_impl = lambda x, topk: sizes.append((x.shape[0], extending())) or x
    ids = torch.zeros(40, TOP_K, dtype=torch.int32)
    x = torch.ones(40, fakes.HIDDEN)
    assert fakes.layers_of().compute(layer, x, torch.ones(ids.shape), ids).shape == x.shape
    assert sizes == [(16, True), (16, True), (8, True)]
    assert not extending()


# Batches


def batch(mode: ForwardMode, tokens: int | None = None, extends: bool = False) -> Any:
    return SimpleNamespace(forward_mode=mode, extend_num_tokens=tokens, is_extend_in_batch=extends)


@pytest.mark.parametrize(
    ("ran", "tokens"),
    [
        (batch(ForwardMode.EXTEND, 300), 300),
        (batch(ForwardMode.MIXED, 310), 310),
        (batch(ForwardMode.DECODE), 0),
        (batch(ForwardMode.IDLE), 0),
        (batch(ForwardMode.TARGET_VERIFY, 300), 0),
    ],
)
def test_one_attention_group_counts_its_prefill(ran: Any, tokens: int) -> None:
    fakes.publish()
    told = PrefillTokens()
    with told.running(ran):
        assert told.number == tokens
    assert told.number == 0


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.IDLE])
def test_attention_data_parallelism_counts_all_ranks_tokens(mode: ForwardMode) -> None:
    """The same number, whatever a rank itself does in a batch that is prefill anywhere."""
    fakes.publish(**fakes.DEEPEP)
    told = PrefillTokens()
    told.gathered(None, SimpleNamespace(global_num_tokens=[300, 2, 0]))
    with told.running(batch(mode, 300, extends=True)):
        assert told.number == 302
    with told.running(batch(mode, 300)):
        assert told.number == 0


def hooked(layer: FusedMoE) -> tuple[Any, Noting]:
    """The hooks of a rank that balances ``layer`` alone, by a balancer that takes ids as they are.

    The layer has no slots, so that its kernel's stand-in computes.
    """
    own, noting = hooks._SchedulerHooks(BalanceConfig()), Noting()
    ended: list[Any] = []
    own._flow = SglangFlow(own._tokens)
    own._flow.balancer = noting
    own._balanced = SimpleNamespace(
        require_in_place=lambda: None, end_loading=ended.append, ended=ended, num_layers=1
    )
    balance_dispatch(ExpertWeights(layer, []), 0, own._flow)
    return own, noting


def run(own: Any, ran: Any, call: Any, layer: Any = None, is_draft: bool = False) -> None:
    """``call`` as the forward pass of batch ``ran`` of a model with ``layer``."""
    runner = SimpleNamespace(is_draft_worker=is_draft, model=torch.nn.ModuleList([layer]))
    own.forward(lambda runner, ran: call(), runner, ran)


def experts_of(layer: FusedMoE) -> Any:
    """What computes one token by two experts of ``layer``, the second one with weight 0."""
    weights, chosen = torch.tensor([[0.5, 0.0]]), torch.tensor([[3, 0]], dtype=torch.int32)
    x = torch.ones(1, fakes.HIDDEN, dtype=torch.bfloat16)
    return lambda: layer(x, StandardTopKOutput(weights, chosen, weights))


def test_zero_experts_are_no_load() -> None:
    """LongCat's leave SGLang's router as expert 0 with weight 0; in decode nothing is planned.

    In other models weights of 0 are rare and loads count them.
    """
    layer = fakes.loaded_layer()
    own, noting = hooked(layer)
    run(own, batch(ForwardMode.EXTEND, 300), experts_of(layer))
    own._flow.has_zero_experts = True
    run(own, batch(ForwardMode.EXTEND, 300), experts_of(layer))
    run(own, batch(ForwardMode.DECODE), experts_of(layer))
    assert [ids.tolist() for ids in noting.routed] == [[[3, 0]], [[3, -1]], [[3, 0]]]


def test_a_kernel_that_nobody_knows_cannot_compute_before_copies_have_come() -> None:
    """SGLang's layer calls its dispatcher, then experts, whatever kernel they have."""
    layer = fakes.loaded_layer()
    own, noting = hooked(layer)
    core = layer.run_moe_core
    layer.run_moe_core = lambda **given: noting.seen.append("experts") or core(**given)
    run(own, batch(ForwardMode.EXTEND, 300), experts_of(layer))
    expected = [("route", 0, 300), ("receive", 0), "experts", ("experts done", 0), ("computed", 0)]
    assert noting.seen == expected


def test_models_that_compute_a_layer_in_their_own_way_do_not_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their ids would be logical where kernels take physical ones; the warm-up finds it."""
    layer = fakes.loaded_layer()
    own, _ = hooked(layer)
    run(own, batch(ForwardMode.EXTEND, 0), lambda: None)  # another rank's prefill
    run(own, batch(ForwardMode.DECODE), lambda: None)  # perhaps in a CUDA graph
    run(own, batch(ForwardMode.EXTEND, 300), lambda: None, is_draft=True)
    with pytest.raises(UnsupportedError, match="the model did not call it in a prefill"):
        run(own, batch(ForwardMode.EXTEND, 300), lambda: None, layer)


def test_loading_ends_behind_the_first_prefill_that_is_served() -> None:
    layer = fakes.loaded_layer()
    own, _ = hooked(layer)
    run(own, batch(ForwardMode.EXTEND, 300), experts_of(layer))  # while the scheduler is made
    own._is_made = True
    run(own, batch(ForwardMode.DECODE), experts_of(layer))
    assert not own._balanced.ended
    for _ in range(2):
        run(own, batch(ForwardMode.EXTEND, 300), experts_of(layer))
    assert own._balanced.ended == [hooks.logger]


def test_draft_models_keep_their_experts_at_home() -> None:
    layer, draft = fakes.loaded_layer(), fakes.loaded_layer()
    own, noting = hooked(layer)
    run(own, batch(ForwardMode.EXTEND, 300), experts_of(draft), is_draft=True)
    assert noting.seen == []
    draft.is_draft = True
    assert model.moe_layers(torch.nn.ModuleList([draft, layer])) == [layer]


def test_a_draft_models_experts_leave_the_deepep_buffer_alone() -> None:
    """Its offsets depend on the number of experts, which slots change for the target only."""
    own = hooks._SchedulerHooks(BalanceConfig())
    draft = torch.nn.ModuleList([fakes.loaded_layer(**fakes.DEEPEP)])
    runner = SimpleNamespace(is_draft_worker=True, model=draft)
    own.loaded(runner)  # served by SGLang alone
    own._balanced = SimpleNamespace()
    with pytest.raises(UnsupportedError, match="use --speculative-moe-a2a-backend none"):
        own.loaded(runner)
    runner.model = torch.nn.ModuleList([fakes.loaded_layer()])
    own.loaded(runner)


def held(layer: FusedMoE) -> Any:
    """What remembers where the experts of ``layer`` are."""
    made = ExpertWeights(layer, model.movable_parameters(layer))
    made.hide_slots(SHAPE.num_masters, lambda layer: layer.dispatcher)
    return SimpleNamespace(require_in_place=made.require_in_place, num_layers=1)


def test_the_kernel_finds_slots_where_programs_find_masters() -> None:
    """Also while micro-batches overlap, and whichever way the model calls the kernel."""
    layer = fakes.loaded_layer()
    own, plain = model.movable_parameters(layer), dict(layer.state_dict())
    weights, balanced = ExpertWeights(layer, own), fakes.layers_of()
    balanced.give_slots([weights], SHAPE)
    for parameter in own:
        parameter.data = torch.cat([parameter.data, parameter.data[: SHAPE.num_slots] + 1])
    weights.hide_slots(SHAPE.num_masters, balanced.kernel)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, plain[name]), name
    shown = layer.w13_weight
    dispatcher, rows = layer.dispatcher, lambda: layer.w13_weight.shape[0]
    for hooks_, expected in (
        (dispatcher._post_dispatch_hooks, SHAPE.num_local),
        (dispatcher._post_dispatch_hooks, SHAPE.num_local),  # of another micro-batch
        (dispatcher._pre_combine_hooks, SHAPE.num_local),
        (dispatcher._pre_combine_hooks, SHAPE.num_masters),
    ):
        hooks_(dispatcher, None)
        assert rows() == expected
    assert layer.w13_weight is shown
    weights.require_in_place()


def test_weights_loaded_in_place_are_balanced_and_others_refused() -> None:
    layer = fakes.loaded_layer()
    own, _ = hooked(layer)
    own._balanced = held(layer)
    layer.w13_weight.data.fill_(2)
    run(own, batch(ForwardMode.DECODE), lambda: None)
    layer.w13_weight = torch.nn.Parameter(layer.w13_weight.data.clone(), requires_grad=False)
    with pytest.raises(UnsupportedError, match="its weights were replaced after loading"):
        run(own, batch(ForwardMode.DECODE), lambda: None)
    with pytest.raises(UnsupportedError, match="its weights were replaced after loading"):
        own._check_adopted(torch.nn.ModuleList([layer]))


# The whole adapter


def loaded(config: BalanceConfig, server_args: Any, *layers: FusedMoE) -> Any:
    own = hooks._SchedulerHooks(config)
    built = torch.nn.ModuleList(layers)
    own.loaded(SimpleNamespace(is_draft_worker=False, server_args=server_args, model=built))
    return own


def test_models_whose_layers_share_no_slots_or_have_no_experts_are_refused() -> None:
    layers = [fakes.loaded_layer(), fakes.loaded_layer()]
    layers[1].num_experts = 24
    with pytest.raises(UnsupportedError, match=r"experts \[12, 24\] share no slots"):
        loaded(BalanceConfig(), fakes.publish(), *layers)
    with pytest.raises(
        UnsupportedError, match=r"no experts in SGLang's FusedMoE layers, .*; set on_unsup"
    ):
        loaded(BalanceConfig(), fakes.publish())


@pytest.mark.parametrize("num_data", [1, 3])
def test_batches_that_are_all_small_are_not_balanced_in_silence(
    num_data: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts are the tokens of all ranks; before anything is loaded."""
    changes = {"chunked_prefill_size": 255 // num_data, "attn_dp_size": num_data}
    seen: list[Any] = []
    runner = SimpleNamespace(
        is_draft_worker=False,
        server_args=fakes.publish(**changes),
        model=torch.nn.ModuleList([fakes.loaded_layer(**changes)]),
    )
    with pytest.raises(UnsupportedError, match="choose --min-batch-tokens 255 or less"):
        hooks._SchedulerHooks(BalanceConfig()).load(seen.append, runner)
    assert not seen
    monkeypatch.setattr(started, "_made", [SimpleNamespace(path=tmp_path)])
    own = hooks._SchedulerHooks(BalanceConfig(on_unsupported="off"))
    own.load(seen.append, runner)
    assert seen == [runner]
    assert own._balanced is None
    assert "has 255 over all ranks" in (tmp_path / "unbalanced").read_text()


@pytest.mark.parametrize("changes", [{"chunked_prefill_size": -1}, {"enable_mixed_chunk": True}])
def test_batches_without_a_bound_are_taken_for_large(changes: dict[str, Any]) -> None:
    fakes.publish(**{"chunked_prefill_size": 255, **changes})
    assert model.largest_batch() is None


def test_unsupported_models_are_served_by_sglang_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever was told to the layers before they were refused is told back."""
    layer = fakes.loaded_layer()

    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedError("tensors that cannot be moved")

    monkeypatch.setattr(group, "BalancedLayers", refuse)
    monkeypatch.setattr(started, "_made", [SimpleNamespace(path=tmp_path)])
    own = loaded(BalanceConfig(on_unsupported="off"), fakes.publish(), layer)
    assert (tmp_path / "unbalanced").read_text() == "tensors that cannot be moved"
    assert layer.dispatcher._pre_dispatch_hooks is None
    own.scheduler_made(None, None)  # which serves
    assert told(layer) == {(NUM_EXPERTS, SHAPE.num_masters)}


def test_hooks_on_a_gpu_leave_its_kernels_alone_and_policy_off_all_of_sglang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    targets: list[str] = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, *_: targets.append(target))
    hooks.install(BalanceConfig(policy=Policy.OFF))
    assert targets == []
    hooks.install(BalanceConfig())
    assert set(targets) == {
        hooks.END, hooks.LOAD, hooks.FORWARD, hooks.LAUNCH, hooks.SCHEDULER, hooks.GATHER,
        hooks.REQUESTS,
    }  # fmt: skip


def test_copies_are_forgotten_with_every_request_that_may_change_weights() -> None:
    own, forgotten = hooks._SchedulerHooks(BalanceConfig()), []
    own.requests_processed(None, None, [object()])  # before there is a model
    own._balanced = SimpleNamespace(  # type: ignore[assignment]
        balancer=SimpleNamespace(forget=lambda: forgotten.append(1))
    )
    # objects of the same names: SGLang's own take arguments
    made = {name: type(name, (), {})() for name in vars(io_struct)}
    own.requests_processed(None, None, [made[name] for name in hooks._LEAVING_WEIGHTS.split()])
    assert not forgotten
    for name in "UpdateWeightFromDiskReqInput", "RpcReqInput":
        own.requests_processed(None, None, [made[name]])
    assert len(forgotten) == 2


@pytest.mark.parametrize(("changes", "adds_up"), [({}, True), (fakes.DEEPEP, False)])
def test_models_of_the_transformers_backend_add_up_routed_experts(
    changes: dict[str, Any], adds_up: bool
) -> None:
    """SGLang leaves it out where there are shared experts, too; DeepEP's combine adds up itself."""
    layer = fakes.loaded_layer(**changes)
    wrapper = TransformersFusedMoE.__new__(TransformersFusedMoE)
    torch.nn.Module.__init__(wrapper)
    wrapper.experts = layer
    assert not layer.reduce_results
    model.complete_outputs(torch.nn.ModuleList([wrapper]))
    assert layer.reduce_results == adds_up


def test_ranks_without_their_hooks_do_not_serve_and_the_server_says_so_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(refusals, "_path", lambda _: tmp_path / "reason")
    own = hooks._SchedulerHooks(BalanceConfig())
    with pytest.raises(UnsupportedError, match="SGLang did not apply the hooks on"):
        own.scheduler_made(None, None)
    server = os.fork()
    if not server:
        monkeypatch.setattr(refusals, "first_process", os.getpid)
        hooks.end(kill_process_tree, os.getpid())
    assert os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]) == 1
    assert capfd.readouterr().err.startswith("ultraep: error: SGLang did not apply the hooks on")
    server = os.fork()  # without a reason it ends as SGLang has it
    if not server:
        hooks.end(kill_process_tree, os.getpid())
    assert os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]) == -signal.SIGKILL
