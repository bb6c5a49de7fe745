"""SGLang's megakernel over masters and slots: its own code, with a reference of DeepGEMM."""

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("sglang", reason="needs SGLang: deploy/setup_sglang_cpu.py")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when SGLang has it compile
    from tests.support import sglang_fakes as fakes  # has what SGLang looks for

    # isort: split
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.layers.moe import mega_moe as launches
    from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class
    from sglang.srt.layers.quantization import fp8, modelopt_quant
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from ultraep_serve.engines.sglang import checks, hooks, model
    from ultraep_serve.engines.sglang.mega_moe import MegaMoe
    from ultraep_serve.engines.sglang.stage import PrefillTokens, SglangFlow, _Stage

from tests.emulated_gpu.references import mega_moe as deep_gemm
from tests.emulated_gpu.references.flashinfer import put
from tests.support.experts import (
    ALWAYS_PAYS,
    NUM_EXPERTS,
    TOP_K,
    Noting,
    expected_output,
    make_batch,
)
from tests.support.held import Held
from tests.support.hosts import engine_group, meet_in
from tests.support.ranks import run_settings
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.weights import ExpertWeights
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.sidecar.proof import verification_of
from ultraep_serve.telemetry.reader import RingReader

NUM_RANKS, NUM_SLOTS = fakes.SHAPE.num_ranks, fakes.SHAPE.num_replica_slots
NUM_MASTERS, NUM_LOCAL = fakes.SHAPE.num_masters, fakes.SHAPE.num_local
HIDDEN, INNER, THRESHOLD, NUM_LAYERS = 512, 256, 24, 2
MEGA = {"moe_a2a_backend": "megamoe", "attn_dp_size": NUM_RANKS}
FP4 = {"is_checkpoint_fp8_serialized": True, "weight_block_size": [128, 128]}
ALPHAS = "mega_l1_alphas", "mega_l2_alphas", "mega_l2_act_scales"  # of NVFP4
RIGHT = "per_layer", "shared"  # memory of slots
NOT_MAPPED, NOT_AWAITED = "ids as they come", "copies not awaited"  # wrong adapters
EXTEND, DECODE, IDLE = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.IDLE
BATCHES: dict[str, tuple[tuple[Any, int], tuple[Any, int]]] = {  # of rank 0, and of the others
    "large": ((EXTEND, 30), (EXTEND, 30)),
    "idle rank": ((IDLE, 0), (EXTEND, 30)),
    "decode": ((DECODE, 30), (DECODE, 30)),
}


def install(launched: Any, set_attribute: Any = setattr) -> None:
    """Have SGLang find the reference, on a Blackwell GPU; ``launched`` is told of staged ids."""

    def stage(x: Any, ids: Any, weights: Any, *buffers: Any, shared_block_m: int, **named: Any):  # type: ignore[no-untyped-def]
        assert not shared_block_m
        launched(ids.clone())
        deep_gemm.stage_inputs(x, weights, ids, *(buffer[: len(x)] for buffer in buffers))
        buffers[2][len(x) :] = -1

    def launch(*given: Any, activation: str, recipe: Any, **named: Any) -> None:
        assert (activation, recipe) == ("swiglu", (1, 1, 32))
        clamp = named.pop("activation_clamp"), named.pop("fast_math")
        assert not any(named.values()), "no shared experts"
        deep_gemm.fp8_fp4_mega_moe(*given, *clamp)

    def required(scales: torch.Tensor, **_: Any) -> torch.Tensor:
        """Powers of two, four in an int32, whose rows lie side by side."""
        packed = (scales.log2() + 127).to(torch.uint8).view(torch.int32)
        return packed.transpose(1, 2).contiguous().transpose(1, 2)

    put(
        "deep_gemm",
        get_symm_buffer_for_mega_moe=deep_gemm.get_symm_buffer_for_mega_moe,
        fp8_fp4_mega_moe=launch,
        transform_sf_into_required_layout=required,
        get_num_sms=lambda: 132,
        transform_weights_for_mega_moe=lambda l1, l2, **_: (l1, l2),
    )
    put("deep_gemm.utils")
    put("deep_gemm.utils.math", transform_ue4m3_sf_into_required_layout=lambda scales, _: scales)
    set_attribute(launches, "_device_sm", 100)
    set_attribute(launches, "_mega_moe_max_num_sms", lambda: None)
    set_attribute(launches, "mega_moe_pre_dispatch", stage)


def layer_of(config: Any, seed: int) -> Any:
    """A layer as SGLang's models build it; weights not loaded."""
    with torch.device("cpu"):
        return get_moe_impl_class(config)(
            num_experts=NUM_EXPERTS,
            top_k=TOP_K,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            layer_id=seed,
            params_dtype=torch.bfloat16,
            quant_config=config,
            prefix=f"model.layers.{seed}.mlp.experts",
        )


def build(seed: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """A layer with experts in FP4, and what they all stand for: (E, ...) in float32."""
    layer = layer_of(Fp8Config(**FP4, is_fp4_experts=True), seed)
    random, plain, tensors = torch.Generator().manual_seed(seed), {}, {}
    for name, rows, columns in (("w13", 2 * INNER, HIDDEN), ("w2", HIDDEN, INNER)):
        weight = torch.randint(256, (NUM_EXPERTS, rows, columns // 2), generator=random)
        exponents = torch.randint(120, 123, (NUM_EXPERTS, rows, columns // 32), generator=random)
        tensors[f"{name}_weight"] = weight.to(torch.uint8).view(torch.int8)
        tensors[f"{name}_weight_scale_inv"] = torch.exp2(exponents - 127.0)
        packed = exponents.to(torch.uint8).view(torch.int32)
        parts = zip(weight.to(torch.uint8), packed, strict=True)
        plain[f"{name}_weight"] = torch.stack(
            [deep_gemm.values(deep_gemm.fp4(own), scales) for own, scales in parts]
        )
    fakes.load(layer, tensors)
    return layer, plain


def serve_on_rank(rank: int, run_dirs: list[str]) -> list[dict[str, Any]]:
    engine_group(run_dirs[0], rank, NUM_RANKS)
    torch.set_num_threads(1)  # small products; ranks share the machine
    fakes.pretend_gpu(setattr)
    names = (*RIGHT, NOT_MAPPED, NOT_AWAITED)
    return [serve(name, rank, run_dir) for name, run_dir in zip(names, run_dirs, strict=True)]


def serve(name: str, rank: int, run_dir: str) -> dict[str, Any]:
    """Outputs before and after layers are balanced, by batch and layer."""
    server_args = fakes.publish(rank, **MEGA)
    deep_gemm.SymmBuffer.made.clear()
    launches._MEGA_MOE_SYMM_BUFFER.clear()
    meet_in(run_dir)
    held, taken = Held(Path(run_dir), rank, NUM_RANKS), []
    install(taken.append)
    # where the kernel has read its experts, and before it needs the others
    everywhere = deep_gemm.everywhere
    setattr(deep_gemm, "everywhere", lambda *of: (held.come(), everywhere(*of))[1])  # noqa: B010 mypy
    built = [build(seed) for seed in range(NUM_LAYERS)]
    layers, plain = [layer for layer, _ in built], [tensors for _, tensors in built]
    config = BalanceConfig(
        slots=NUM_SLOTS,
        min_batch_tokens=THRESHOLD,
        costs=ALWAYS_PAYS,
        slot_memory=name if name in RIGHT else "shared",
        self_check="quick" if name in RIGHT else "off",
        verify_every=int(name in RIGHT),
    )
    own, ids = hooks._SchedulerHooks(config), {}
    for target in (hooks.GATHER, hooks.LAUNCH):
        fakes.in_registry(own, target)
    every = torch.nn.ModuleList(layers)
    runner = SimpleNamespace(is_draft_worker=False, server_args=server_args, model=every)

    def run(batch: str) -> list[torch.Tensor]:
        outputs, ids[batch] = [], []
        mode, tokens = BATCHES[batch][min(rank, 1)]
        info = fakes.gather(mode, tokens)
        forward = SimpleNamespace(
            forward_mode=mode,
            extend_num_tokens=tokens if mode is EXTEND else None,
            is_extend_in_batch=info.is_extend_in_batch,
        )

        def run_layers(*_: Any) -> None:
            for layer in layers:
                taken.clear()
                outputs.append(launch(layer, tokens))
                ids[batch].append(taken[0].numpy())  # others are of samples

        with torch.inference_mode():
            own.forward(run_layers, runner, forward)
        return outputs

    off = {batch: run(batch) for batch in BATCHES}
    own.loaded(runner)
    run("decode")  # all ranks make the buffer together
    with pytest.MonkeyPatch.context() as patch:
        make_mistake(name, patch)
        held.hold(patch)
        found = {batch: run(batch) for batch in BATCHES}
    own._check_adopted(every)
    samples = verification_of([RingReader(Path(run_dir, f"ring-{rank}")).header()], is_off=False)
    expected = expected_output(tokens_of(rank, 30), plain[0])
    return {
        "same": {batch: all(map(torch.equal, found[batch], off[batch])) for batch in BATCHES},
        "error": float((off["large"][0] - expected).abs().max() / expected.abs().max()),
        "ids": ids,
        "buffers": list(deep_gemm.SymmBuffer.made),
        "rows": [layer.w13_weight.shape[0] for layer in layers],
        "samples": (samples.layers, samples.failures),
    }


def tokens_of(rank: int, tokens: int) -> Any:
    """What the router of ``rank`` gives, for tokens that are the same in FP8."""
    made = make_batch(rank, tokens, HIDDEN)
    return replace(made, x=made.x.to(torch.float8_e4m3fn).to(made.x.dtype))


def launch(layer: Any, tokens: int) -> torch.Tensor:
    """As SGLang's models do: a rank without tokens has no ids."""
    batch = tokens_of(dist.get_rank(), tokens)
    chosen = (batch.ids, batch.weights) if tokens else (None, None)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "top_k": TOP_K}
    output: torch.Tensor = launches.run_mega_routed_experts(
        layer, batch.x, *chosen, **sizes, num_tokens=tokens
    )
    return output.float()


def make_mistake(name: str, patch: pytest.MonkeyPatch) -> None:
    """Have the adapter be wrong in the way of that name."""
    physical, receive, done = _Stage._physical, SglangFlow.receive, SglangFlow.experts_done
    if name == NOT_MAPPED:
        patch.setattr(_Stage, "_physical", lambda *of: (physical(*of), of[1])[1])
    if name == NOT_AWAITED:
        patch.setattr(SglangFlow, "receive", lambda _: None)
        patch.setattr(SglangFlow, "experts_done", lambda flow: (receive(flow), done(flow)))


@pytest.fixture(scope="module")
def served() -> dict[str, list[dict[str, Any]]]:
    """Results by setting and rank."""
    return run_settings(serve_on_rank, NUM_RANKS, (*RIGHT, NOT_MAPPED, NOT_AWAITED))


@pytest.mark.parametrize("memory", RIGHT)
def test_answers_are_those_without_balancing(served: Any, memory: str) -> None:
    """Bit for bit, since a token's sum is taken in one order; and those of the checkpoint."""
    for result in served[memory]:
        assert all(result["same"].values())
        assert result["error"] < 0.02  # bfloat16
        layers, failures = result["samples"]
        assert layers > 0
        assert not failures


@pytest.mark.parametrize("memory", RIGHT)
def test_the_kernel_is_given_physical_ids(served: Any, memory: str) -> None:
    for name in ("large", "idle rank"):  # which plans with the others
        ids = [each for result in served[memory] for each in result["ids"][name]]
        assert any(((own >= 0) & (own % NUM_LOCAL >= NUM_MASTERS)).any() for own in ids)
    for rank, result in enumerate(served[memory]):
        logical = tokens_of(rank, 30).ids.numpy()
        at_home = logical + logical // NUM_MASTERS * NUM_SLOTS
        for own in result["ids"]["decode"]:
            assert ((own == at_home) | ((own == -1) & (logical < 0))).all()


@pytest.mark.parametrize("memory", RIGHT)
def test_one_buffer_is_made_for_slots_and_programs_find_masters(served: Any, memory: str) -> None:
    for result in served[memory]:
        assert result["buffers"] == [NUM_EXPERTS, NUM_RANKS * NUM_LOCAL]
        assert result["rows"] == [NUM_MASTERS] * NUM_LAYERS


@pytest.mark.parametrize("mistake", [NOT_MAPPED, NOT_AWAITED])
def test_a_wrong_adapter_shows(served: Any, mistake: str) -> None:
    assert not all(result["same"]["large"] for result in served[mistake])


# ---- one rank alone


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rank 0's settings, and a platform that can be changed."""
    fakes.pretend_gpu(monkeypatch.setattr)
    install(lambda _: None, monkeypatch.setattr)
    platform = SimpleNamespace(is_sm90=False, is_sm100=True, is_sm120=False, is_blackwell=True)
    for module in (fp8, modelopt_quant):
        monkeypatch.setattr(module, "get_platform", lambda: platform)
    return platform


KINDS = {
    "FP4": (lambda: Fp8Config(**FP4, is_fp4_experts=True), False),
    "FP8, Hopper": (lambda: Fp8Config(**FP4), True),
    "NVFP4": (lambda: ModelOptFp4Config(True, group_size=16, exclude_modules=[]), False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_a_launch_reads_of_experts_has_slots_and_calls_go_in_order(
    alone: Any, kind: str
) -> None:
    config, alone.is_sm90 = KINDS[kind][0](), KINDS[kind][1]
    fakes.publish(**MEGA)
    layer = layer_of(config, 0)
    for parameter in layer.parameters():
        parameter.data.fill_(1)
    layer.quant_method.process_weights_after_loading(layer)
    checks.check_device_execution(layer)
    flow: Any = SglangFlow(PrefillTokens())
    flow.balancer = Noting(100)
    execution = MegaMoe(torch.nn.Module(), flow)
    weights = ExpertWeights(layer, model.movable_parameters(layer))
    execution.give_slots([weights], fakes.SHAPE)
    for parameter in weights.parameters:
        parameter.data = torch.cat([parameter.data, parameter.data[:NUM_SLOTS]])
    weights.hide_slots(NUM_MASTERS, execution.kernel)
    seen: list[Any] = []

    def kernel(layer: Any, x: Any, ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """What ``run_mega_routed_experts`` reads, and when."""
        alphas = [getattr(layer, name) for name in ALPHAS if hasattr(layer, name)]
        parts = *layer.mega_l1_weights, *layer.mega_l2_weights, *alphas
        seen.append((layer.num_experts, {len(part) for part in parts}, ids.flatten().tolist()))
        flow.balancer.seen.append("launch")
        return torch.zeros(len(x), HIDDEN)

    ids = torch.zeros(2, TOP_K, dtype=torch.int32)
    x = torch.ones(2, HIDDEN)
    own = hooks._SchedulerHooks(BalanceConfig())
    own._flow = flow
    own.launch(kernel, layer, x, ids, torch.ones(ids.shape), num_tokens=2)
    own.launch(kernel, layer, x[:0], None, None, num_tokens=0)
    physical = NUM_RANKS * NUM_LOCAL
    assert seen == [(physical, {NUM_LOCAL}, [100] * 2 * TOP_K), (physical, {NUM_LOCAL}, [])]
    names = [each if isinstance(each, str) else each[0] for each in flow.balancer.seen]
    assert names == ["route", "receive", "launch", "experts done", "computed"] * 2
    assert len(layer.w2_weight) == NUM_MASTERS
    execution.take_slots([weights], fakes.SHAPE)
    own.launch(kernel, layer, x, ids, torch.ones(ids.shape), num_tokens=2)
    assert (seen[-1][0], seen[-1][2]) == (NUM_EXPERTS, [0] * 2 * TOP_K)


def test_what_is_computed_apart_is_not_balanced_and_split_as_the_buffer_is(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the shared expert that SGLang fuses, since it makes another buffer without."""
    monkeypatch.setenv("SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK", "16")
    fakes.publish(**MEGA)
    layer, _ = build(0)
    block: Any = torch.nn.Module()
    block.experts, block.n_shared_experts = layer, 1
    block.mega_shared_l1_weights = block.mega_shared_l2_weights = ("weights", "scales")
    flow: Any = SglangFlow(PrefillTokens())
    flow.balancer = Noting(100)
    execution = MegaMoe(block, flow)
    execution.give_slots([ExpertWeights(layer, model.movable_parameters(layer))], fakes.SHAPE)
    calls: list[Any] = []

    def kernel(layer: Any, x: Any, ids: Any, weights: Any, **named: Any) -> torch.Tensor:
        calls.append((len(x), int(ids[0, 0]), named["num_shared_experts"]))
        return x

    monkeypatch.setattr(launches, "run_mega_routed_experts", kernel)
    ids = torch.ones(40, TOP_K, dtype=torch.int32)
    x = torch.ones(40, HIDDEN)
    assert execution.compute(layer, x, torch.ones(ids.shape), ids).shape == x.shape
    assert calls == [(16, 1, 1), (16, 1, 1), (8, 1, 1)]
    assert not flow.balancer.routed


@pytest.mark.parametrize(
    ("environment", "changes", "settings", "says"),
    [
        ({}, {}, {"speeds": "auto"}, "use --speeds equal, or numbers"),
        ({"SGLANG_OPT_DEEPGEMM_MEGA_GATE": "1"}, {}, {}, "MEGA_GATE gives ids .* unset it"),
        ({}, {"chunked_prefill_size": 3 * 16384}, {}, "a smaller --chunked-prefill-size"),
        ({}, {"chunked_prefill_size": -1}, {}, "a smaller --chunked-prefill-size"),
    ],
)
def test_batches_that_pass_the_launch_are_refused(
    alone: Any,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    changes: dict[str, Any],
    settings: dict[str, Any],
    says: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    resolved = resolving_view(fakes.publish(**MEGA, **changes))
    checks.check_settings(resolved)
    with pytest.raises(UnsupportedError, match=says):
        checks.check_mega_moe(resolved, BalanceConfig(**settings))


def test_experts_that_the_launch_does_not_take_are_refused(alone: Any) -> None:
    """As those of models that launch it themselves, Kimi-K3's."""
    fakes.publish(**MEGA)
    layer, _ = build(0)
    checks.check_device_execution(layer)
    layer._mega_moe_weights_built = False
    with pytest.raises(UnsupportedError, match="not been verified with Fp8MoEMethod; use --moe-a2"):
        checks.check_device_execution(layer)
