"""Hooks on SGLang's own functions, through SGLang's own registry for that."""

import inspect
import logging
import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import is_cpu

from ultraep_serve.balance.speeds import expert_clock
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.rendezvous import refuse_or_serve_plainly
from ultraep_serve.engines.common.requirements import require_parameters
from ultraep_serve.engines.sglang.checks import (
    check_checkpoint,
    check_cpu_execution,
    check_draft_layer,
    check_engine,
    check_settings,
)
from ultraep_serve.engines.sglang.cpu_experts import (
    complete_device_module,
    compute_and_reduce,
    compute_own,
)
from ultraep_serve.engines.sglang.execution import CpuExperts, DeviceExperts
from ultraep_serve.engines.sglang.group import ExpertGroup, complete_outputs, expert_layers
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.system.environment import first_process
from ultraep_serve.system.versions import SGLANG
from ultraep_serve.types import Policy

__all__ = ["PrefillTokens", "install"]

logger = logging.getLogger(__name__)

LOAD = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
EXPERTS = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.forward_impl"
CORE = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.run_moe_core"
COMPUTE = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.__init__"
GATHER = "sglang.srt.managers.scheduler_components.dp_attn.MLPSyncBatchInfo.all_gather"

# Of the functions whose parameters a hook tells apart by their order.
_PARAMETERS = {
    FORWARD: "self forward_batch skip_attn_backend_init pp_proxy_tensors reinit_attn_backend "
    "split_forward_count",
    EXPERTS: "self hidden_states topk_output pre_quant_input",
    COMPUTE: "layer x topk_output moe_runner_config",
}


def install(config: BalanceConfig) -> None:
    """Register this process's hooks; SGLang applies them when all its plugins have registered.

    Raises UnsupportedError for an engine this adapter was not verified with.
    """
    if config.policy is Policy.OFF and not is_cpu():
        return  # SGLang's own expert parallelism works there
    is_primary = first_process() == os.getpid()
    try:
        told = check_engine(config.on_newer_engine)
    except UnsupportedError as error:
        refuse_or_serve_plainly(error, config, logger, is_primary=is_primary)
        return
    if told and is_primary:
        logger.warning("ultraep: %s", told)
    if is_cpu():
        complete_device_module()
    for target, (hook, kind) in _SchedulerHooks(config).by_target().items():
        HookRegistry.register(target, hook, kind)


class _SchedulerHooks:
    """The hooks of one scheduler process and what they share. Verified with SGLang 0.5.23."""

    def __init__(self, config: BalanceConfig) -> None:
        self._config = config
        self._execution = CpuExperts() if is_cpu() else DeviceExperts()
        self._group: ExpertGroup | None = None
        self._served_plainly = False  # because on_unsupported is off
        self._is_made = False  # the scheduler, with all that it tries out
        self._tokens = PrefillTokens()

    def by_target(self) -> dict[str, tuple[Callable[..., Any], HookType]]:
        """Return hooks by target; without balancing only what expert parallelism on CPU needs."""
        hooks: dict[str, tuple[Callable[..., Any], HookType]] = {
            LOAD: (self.load, HookType.AROUND),
        }
        if is_cpu():
            hooks[COMPUTE] = (self.compute, HookType.AROUND)
        if self._config.policy is not Policy.OFF:
            hooks[GATHER] = (self._tokens.gathered, HookType.AFTER)
            hooks[FORWARD] = (self.forward, HookType.AROUND)
            hooks[EXPERTS] = (self.experts, HookType.AROUND)
            if not is_cpu():
                hooks[CORE] = (self.core, HookType.AROUND)
            hooks[SCHEDULER] = (self.scheduler_made, HookType.AFTER)
        return hooks

    def load(self, original: Callable[..., None], runner: Any) -> None:
        """Refuse what this CPU cannot compute; take the experts over once their weights are final.

        Target: ``ModelRunner.load_model``, whose loader has run all post-processing when it
        returns. AROUND. Remove when SGLang tells plugins that a model is loaded.
        """
        if is_cpu() and runner.server_args.ep_size > 1:
            check_checkpoint(runner.model_config)
        original(runner)
        self.loaded(runner)

    def loaded(self, runner: Any) -> None:
        """Take over the experts of ``runner``'s model; a draft model's stay at home."""
        complete_outputs(runner.model)
        if self._config.policy is not Policy.OFF and not runner.is_draft_worker:
            try:
                check_hooked_functions()
                check_settings(resolving_view(runner.server_args))
                self._group = ExpertGroup(self._config, runner.model, self._execution)
                return
            except UnsupportedError as error:
                is_primary = get_parallel().tp_rank == 0
                refuse_or_serve_plainly(error, self._config, logger, is_primary=is_primary)
                self._served_plainly = True
        check = check_cpu_execution if is_cpu() else check_draft_layer
        if is_cpu() or self._group is not None:
            for layer in expert_layers(runner.model):
                check(layer)

    def forward(
        self,
        original: Callable[..., Any],
        runner: Any,
        forward_batch: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """Keep whether a batch is prefill and how large it is, which experts cannot see.

        Target: ``ModelRunner.forward``, which every batch passes. AROUND. Remove when a batch's
        forward mode can be read in a layer without a forward context.
        """
        if runner.is_draft_worker or self._group is None:
            return original(runner, forward_batch, *rest, **named)
        with self._tokens.running(forward_batch):
            output = original(runner, forward_batch, *rest, **named)
            has_prefill = self._tokens.number > 0
        if own_prefill_tokens(forward_batch):
            self._group.check_all_routed()
        if has_prefill and self._is_made:
            self._group.end_loading()
        return output

    def experts(
        self,
        original: Callable[..., Any],
        layer: FusedMoE,
        hidden_states: torch.Tensor,
        topk_output: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """Balance: give physical ids to everything behind routing.

        Target: ``FusedMoE.forward_impl``, behind routing and before dispatch; SGLang's recorder has
        counted the router's own choice by then. AROUND. Remove when SGLang can place and split
        experts batch by batch itself.
        """
        if self._group is None or layer not in self._group:
            return original(layer, hidden_states, topk_output, *rest, **named)
        assert TopKOutputChecker.format_is_standard(topk_output), type(topk_output)
        ids, weights = topk_output.topk_ids, topk_output.topk_weights
        if self._tokens.number and self._group.has_zero_experts:
            ids = ids.masked_fill(weights == 0, -1)
        physical = self._group.route(layer, ids, self._tokens.number)
        balanced = topk_output._replace(topk_ids=physical)
        output = original(layer, hidden_states, balanced, *rest, **named)
        self._group.computed()
        return output

    def core(self, original: Callable[..., Any], layer: FusedMoE, *rest: Any, **named: Any) -> Any:
        """Say when a device's experts are launched, for the speeds of ranks.

        Target: ``FusedMoE.run_moe_core``, between dispatch and combine. AROUND. Remove with
        ``experts``.
        """
        with expert_clock:
            return original(layer, *rest, **named)

    def compute(
        self,
        original: Callable[..., torch.Tensor],
        layer: FusedMoE,
        x: torch.Tensor,
        topk_output: Any,
        moe_runner_config: Any,
    ) -> torch.Tensor:
        """Compute local experts only, where SGLang's own torch path stumbles over remote ones.

        Target: ``fused_moe_native.moe_forward_native``, the CPU path without AMX kernels. AROUND.
        Remove when it skips assignments with id -1.
        """
        if layer.moe_ep_size == 1:
            return original(layer, x, topk_output, moe_runner_config)
        chosen = topk_output.topk_weights, topk_output.topk_ids
        if x.shape[0] < self._config.min_batch_tokens:  # nothing is computed elsewhere
            return compute_own(layer, x, *chosen).to(x.dtype)
        return compute_and_reduce(layer, x, *chosen)

    def scheduler_made(self, _result: None, scheduler: Any, *_: Any, **__: Any) -> None:
        """Let this rank serve only when it really balances; SGLang only logs failures of plugins.

        Target: ``Scheduler.__init__``, which ends before the first request is taken. AFTER. Raises
        UnsupportedError, which ends the server. Remove when SGLang stops on plugins that fail.
        """
        if self._served_plainly:
            return
        hooks = self.by_target().items()
        missing = [target for target, (hook, _) in hooks if not _is_in_place(target, hook)]
        if missing or self._group is None:
            raise UnsupportedError(
                f"SGLang did not apply the hooks on {missing or [LOAD]}; see its log for the reason"
            )
        self._group.check_adopted(scheduler.tp_worker.model_runner.model)
        self._group.mark_ready()
        self._is_made = True


def check_hooked_functions() -> None:
    """Raise UnsupportedError where a hooked function takes other parameters than its hook knows.

    SGLang's wrappers have the signature of what they wrap. Call it when SGLang is imported.
    """
    for target, expected in _PARAMETERS.items():
        require_parameters(SGLANG, pkgutil.resolve_name(target), expected)


def _is_in_place(target: str, hook: Callable[..., Any]) -> bool:
    """Whether calling what ``target`` names calls ``hook``: SGLang's wrappers close over theirs."""
    wrapper = pkgutil.resolve_name(target)
    while wrapper is not None:
        if inspect.getclosurevars(wrapper).nonlocals.get("hook") == hook:
            return True
        wrapper = getattr(wrapper, "__wrapped__", None)
    return False


_PREFILL = (ForwardMode.EXTEND, ForwardMode.MIXED)


class PrefillTokens:
    """The tokens of the batch that runs; 0 where it is not prefill, which is never planned.

    Ranks of one attention group run the same batch. With attention data parallelism every rank has
    a batch of its own, of decode or with nothing in it while another one's is prefill: then all
    their numbers count, which SGLang's schedulers gather before they run anything.
    """

    def __init__(self) -> None:
        self.number = 0
        self._gathered = 0

    def gathered(self, _result: None, info: Any, *_: Any, **__: Any) -> None:
        """Keep the number of all ranks' tokens.

        Target: ``MLPSyncBatchInfo.all_gather``, behind which every rank has the same. AFTER. A
        batch itself only tells them where dense layers gather tokens too. Remove when it always
        does.
        """
        self._gathered = sum(info.global_num_tokens)

    @contextmanager
    def running(self, forward_batch: Any) -> Iterator[None]:
        """Count while SGLang runs ``forward_batch``; what it captures or tries out counts 0."""
        self.number = self._of(forward_batch)
        try:
            yield
        finally:
            self.number = 0

    def _of(self, forward_batch: Any) -> int:
        if get_parallel().attn_dp_size > 1:
            return self._gathered if forward_batch.is_extend_in_batch else 0
        return own_prefill_tokens(forward_batch)


def own_prefill_tokens(forward_batch: Any) -> int:
    """Return this rank's tokens; with attention data parallelism others may have more."""
    if forward_batch.forward_mode in _PREFILL:
        return int(forward_batch.extend_num_tokens or 0)
    return 0
