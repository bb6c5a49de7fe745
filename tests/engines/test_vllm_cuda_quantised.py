"""Quantised experts on GPUs: what a copy takes along, in vLLM's own methods' order of tensors."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    from vllm.config import set_current_vllm_config
    from vllm.config.quantization import QuantizationConfigArgs
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as fp8_kernels
    from vllm.model_executor.layers.quantization.online import fp8 as online_fp8
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from tests.support import vllm_layers, vllm_reference_kernels
    from tests.support.vllm_formats import FORMATS, build_format
    from tests.support.vllm_gpu import (
        NAMES,
        NUM_LOCAL,
        NUM_MASTERS,
        NUM_RANKS,
        NUM_SLOTS,
        SHAPE,
        build,
        fp8_config,
    )
    from ultraep_serve.engines.vllm import checks, expert_tensors, load, model
    from ultraep_serve.engines.vllm.stage import VllmFlow

from tests.support.experts import NUM_EXPERTS
from ultraep_serve.balance.agreement import SharedValues
from ultraep_serve.engines.common.weights import ExpertWeights
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.types import TokenView


@pytest.mark.parametrize("name", FORMATS)
def test_a_copy_takes_along_all_that_the_kernel_reads(balanced: Any, name: str) -> None:
    """Rows of slots are copied from masters in the layer's parameters, then seen by the kernel."""
    layer, config = build_format(balanced, name)
    checks.check_device_execution(layer, slots=2)
    parameters = expert_tensors.expert_parameters(layer)
    execution = model._Layers(config, VllmFlow(TokenView.OWN), None, [layer])  # type: ignore[arg-type]
    weights, plain = [ExpertWeights(layer, parameters)], layer.quant_method.moe_kernel
    with set_current_vllm_config(config):
        execution.give_slots(weights, SHAPE)
        for parameter in parameters:
            parameter.data = torch.cat([parameter.data, parameter.data[1 : 1 + NUM_SLOTS]])
        seen = dict(read_by_kernel(layer))
        for slot in range(NUM_SLOTS):
            for tensor, value in seen.items():
                rows = value.data.contiguous().view(-1).view(torch.uint8).view(NUM_LOCAL, -1)
                assert torch.equal(rows[NUM_MASTERS + slot], rows[1 + slot]), tensor
        differ = [name for name, value in seen.items() if not expert_tensors._all_rows_equal(value)]
        assert {"w13_weight", "w2_weight", "w1 scale", "w2 scale"} <= set(differ)
        for parameter in parameters:
            parameter.data = parameter.data[:NUM_MASTERS]
        execution.take_slots(weights, SHAPE)
    assert layer.quant_method.moe_kernel is plain
    assert {value.shape[0] for _, value in read_by_kernel(layer)} == {NUM_MASTERS}
    assert layer.global_num_experts == layer.expert_map.numel() == NUM_EXPERTS


def read_by_kernel(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What the kernel has once per local expert, by name."""
    experts = layer.quant_method.moe_kernel.fused_experts
    values = {"w13_weight": layer.w13_weight, "w2_weight": layer.w2_weight}
    for name, value in [*values.items(), *expert_tensors._read_by(experts)]:
        if value.dim() and value.shape[0] in (NUM_LOCAL, NUM_MASTERS):
            yield name, value


def shared_values(layer: Any) -> SharedValues:
    return expert_tensors.shared_values(layer, expert_tensors.expert_parameters(layer))


def refused(layer: Any) -> str:
    with pytest.raises(UnsupportedError, match="set on_unsupported to off") as found:
        shared_values(layer)
    return str(found.value)


@pytest.mark.parametrize(
    ("make", "name", "remedy"),
    [
        (
            lambda patch: build(patch, quant_config=fp8_config("static", None))[0],
            "w13_input_scale",
            "a checkpoint with dynamic activation scales",
        ),
        (
            lambda patch: build_format(patch, "nvfp4-flashinfer")[0],
            "w13_input_scale",
            "--moe-backend marlin, which needs no activation scales",
        ),
        (
            lambda patch: build_format(patch, "nvfp4-packed-flashinfer")[0],
            "a1 alpha_or_gscale",
            "--moe-backend marlin, which needs no activation scales",
        ),
    ],
    ids=["fp8", "nvfp4", "nvfp4-packed"],
)
def test_scales_that_a_rank_takes_from_its_own_experts_must_be_the_same_on_all(
    balanced: Any, make: Callable[[Any], Any], name: str, remedy: str
) -> None:
    layer = make(balanced)
    own, same = shared_values(layer), shared_values(make(balanced))
    assert own == same
    assert name in own.names
    assert own.remedy == remedy
    parameters = expert_tensors.expert_parameters(layer)
    value = dict(expert_tensors._shared_values(layer, parameters))[name]
    value.data.mul_(2)
    other = shared_values(layer)
    assert other.digest != own.digest


def test_scales_of_single_experts_that_do_not_move_are_refused(balanced: Any) -> None:
    """vLLM's CUTLASS kernel has one activation scale per expert, computed from a parameter."""
    layer, _ = build_format(balanced, "nvfp4-cutlass")
    config = layer.quant_method.moe_quant_config
    config._a1.alpha_or_gscale = torch.arange(1.0, 1.0 + NUM_MASTERS)
    message = refused(layer)
    assert "a1 alpha_or_gscale of CutlassExpertsFp4 cannot be moved" in message
    assert "use --moe-backend marlin or flashinfer_cutlass" in message


def test_views_of_expert_tensors_are_refused(balanced: Any) -> None:
    """vLLM's CuteDSL kernel has such a view of its scales: it would show the old memory."""
    layer, _ = build_format(balanced, "nvfp4-flashinfer")
    experts = layer.quant_method.moe_kernel.fused_experts
    experts.quant_config._w1.scale = layer.w13_weight_scale.data.permute(1, 2, 0)
    assert "w1 scale of FlashInferExperts cannot be moved" in refused(layer)


def test_scales_that_are_no_tensors_are_refused(balanced: Any) -> None:
    layer, _ = build(balanced)
    layer.quant_method.moe_kernel.fused_experts.quant_config._w1.scale = object()
    assert "where they cannot be copied from" in refused(layer)
    layer.quant_method.moe_kernel.fused_experts.quant_config._w1.scale = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: transpose(layer.w2_weight), "cannot be split by expert"),
        (lambda layer: add(layer, torch.ones(1)), "cannot be split by expert"),
        (lambda layer: add(layer, torch.ones(1, NUM_MASTERS)), r"\(1, 4\) does not hold 4 experts"),
        (lambda layer: wrap(layer), "keeps w13_weight outside of the layer's parameters"),
    ],
    ids=["transposed", "one value", "other dimension", "no parameter"],
)
def test_layouts_that_do_not_hold_one_expert_after_another_are_refused(
    balanced: Any, change: Callable[[Any], None], message: str
) -> None:
    layer, _ = build(balanced)
    change(layer)
    with pytest.raises(UnsupportedError, match=f"{message}.*--moe-backend triton"):
        expert_tensors.expert_parameters(layer)


def transpose(weight: torch.nn.Parameter) -> None:
    weight.data = weight.data.transpose(1, 2)


def add(layer: Any, tensor: torch.Tensor) -> None:
    layer.register_parameter("more", torch.nn.Parameter(tensor))


def wrap(layer: Any) -> None:
    """As vLLM does it with ``triton_kernels``' tensors of MXFP4 weights."""
    weight = layer.w13_weight.data
    del layer.w13_weight
    layer.w13_weight = weight


class Quantising(BaseModelLoader):
    """A loader of a model that is one MoE layer, quantised by vLLM while it is loaded."""

    download_model = None  # type: ignore[assignment]

    def create_model(self, vllm_config: Any, *_: Any, **__: Any) -> torch.nn.Module:
        args = QuantizationConfigArgs(moe="fp8_per_block")  # type: ignore[arg-type]
        parallel = vllm_layers.parallel_of(0, NUM_RANKS, "allgather_reducescatter")
        online = OnlineQuantizationConfig(args)
        layer = vllm_layers.build_layer(vllm_config, parallel, NAMES[0], online)
        self.final = list[int]()  # addresses of weights, each time they were said to be final
        layer.update_param_tp_status = lambda: self.final.append(layer.w13_weight.data_ptr())
        return torch.nn.ModuleList([layer])

    def load_weights(self, loaded: Any, *_: Any) -> None:
        (layer,) = loaded
        assert layer.w13_weight.is_meta
        for expert in range(NUM_MASTERS):
            matrix = torch.full((vllm_layers.INNER, vllm_layers.HIDDEN), 1.0 + expert)
            for name, shard in (("w13_weight", "w1"), ("w13_weight", "w3"), ("w2_weight", "w2")):
                given = matrix.T if shard == "w2" else matrix
                weight = getattr(layer, name)
                weight.weight_loader(weight, given.bfloat16(), name, shard, expert)


@pytest.mark.parametrize("kernel", ["TritonExperts", "SomeExperts"])
def test_experts_quantised_while_loading_are_taken_over_when_that_has_ended(
    balanced: Any, kernel: str
) -> None:
    """vLLM says twice that the weights of such a layer are final; that is no new loading."""
    compiled = online_fp8.per_block_cast_to_fp8
    balanced(online_fp8, "per_block_cast_to_fp8", compiled._torchdynamo_orig_callable)
    chosen = type(kernel, (vllm_reference_kernels.TritonExperts,), {})
    select = lambda config, **_: (fp8_kernels.Fp8MoeBackend.TRITON, chosen)  # noqa: E731
    balanced(online_fp8, "select_fp8_moe_backend", select)
    balanced(torch.accelerator, "empty_cache", lambda: None)
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES[:1])
    loader, seen = Quantising(config.load_config), list[Any]()
    described: Any = SimpleNamespace(
        dtype=torch.bfloat16, quantization="", word_embeddings_untied_by_checkpoint=False
    )
    wrapper = WorkerWrapperBase()
    wrapper.vllm_config = config
    wrapper.worker = SimpleNamespace(
        load_model=lambda: seen.extend(loader.load_model(config, described))
    )
    balanced(model, "take_over", lambda *_: seen.append(list(loader.final)))
    load._load_model(wrapper)
    layer, final = seen
    assert len(final) == 2
    if kernel == "SomeExperts":
        with pytest.raises(UnsupportedError, match="expert kernel SomeExperts has not been verif"):
            checks.check_device_execution(layer, slots=2)
        return
    checks.check_device_execution(layer, slots=2)
    parameters = expert_tensors.expert_parameters(layer)
    assert final[-1] in [parameter.data_ptr() for parameter in parameters]
    dtypes = Counter(parameter.dtype for parameter in parameters)
    assert dtypes == {torch.float8_e4m3fn: 2, torch.float32: 2}  # weights and scales
    held = ExpertWeights(layer, parameters)
    held.hide_slots(NUM_MASTERS, lambda layer: layer.quant_method.moe_kernel)
    held.require_in_place()
