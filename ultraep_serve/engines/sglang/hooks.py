"""Hooks on SGLang's own functions, through SGLang's own registry for that."""

import inspect
import logging
import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import is_cpu

from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.group import BalancedLayers
from ultraep_serve.engines.common.run import refuse_or_serve_plainly
from ultraep_serve.engines.sglang import checks
from ultraep_serve.engines.sglang.host import complete_device_module, compute
from ultraep_serve.engines.sglang.model import (
    balance,
    complete_outputs,
    expert_layers,
    largest_batch,
    moe_layers,
    new_dispatcher,
)
from ultraep_serve.engines.sglang.stage import PrefillTokens, SglangFlow, own_prefill_tokens
from ultraep_serve.errors import POLICY_OFF, UnsupportedError
from ultraep_serve.launcher.engine import require_large_batches
from ultraep_serve.system.environment import first_process
from ultraep_serve.system.refusals import is_refused, repeat_now, repeated_at_exit
from ultraep_serve.system.versions import SGLANG, require_parameters
from ultraep_serve.types import Policy

logger = logging.getLogger(__name__)

LOAD = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
COMPUTE = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
END = "sglang.srt.utils.common.kill_process_tree"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.__init__"
REQUESTS = "sglang.srt.managers.scheduler.Scheduler.process_input_requests"
GATHER = "sglang.srt.managers.scheduler_components.dp_attn.MLPSyncBatchInfo.all_gather"

LAUNCH = "sglang.srt.layers.moe.mega_moe.run_mega_routed_experts"
DISPATCH = "sglang.srt.layers.moe.token_dispatcher.base.BaseDispatcher._dispatch_with_hook"

# Of the functions whose parameters a hook tells apart by their order.
_PARAMETERS = {
    FORWARD: "self forward_batch skip_attn_backend_init pp_proxy_tensors reinit_attn_backend "
    "split_forward_count",
    COMPUTE: "layer x topk_output moe_runner_config",
    DISPATCH: "self hidden_states topk_output",
    LAUNCH: "experts hidden_states topk_ids topk_weights hidden_size intermediate_size top_k "
    "num_tokens activation_clamp routed_scaling_factor activation num_shared_experts "
    "shared_l1_weights shared_l2_weights routing_in_buffer",
    REQUESTS: "self recv_reqs",
}


# Requests that a scheduler answers without a change of its weights; others may change them.
_LEAVING_WEIGHTS = (
    "TokenizedGenerateReqInput BatchTokenizedGenerateReqInput TokenizedEmbeddingReqInput "
    "BatchTokenizedEmbeddingReqInput AbortReq OpenSessionReqInput CloseSessionReqInput "
    "FlushCacheReqInput GetInternalStateReq ProfileReq FreezeGCReq ConfigureLoggingReq "
    "ExpertDistributionReq PauseGenerationReqInput ContinueGenerationReqInput"
)


def install(config: BalanceConfig) -> None:
    """Register this process's hooks; SGLang applies them when all its plugins have registered.

    Raises UnsupportedError for an engine this adapter was not verified with.
    """
    if config.policy is Policy.OFF and not is_cpu():
        return  # SGLang's own expert parallelism works there
    is_primary = first_process() == os.getpid()
    try:
        note = checks.check_engine(config.on_newer_engine)
    except UnsupportedError as error:
        refuse_or_serve_plainly(error, config, logger, is_primary=is_primary)
        return
    if note and is_primary:
        logger.warning("ultraep: %s", note)
    if is_cpu():
        complete_device_module()
    HookRegistry.register(END, end, HookType.AROUND)
    for target, (hook, kind) in _SchedulerHooks(config).by_target().items():
        HookRegistry.register(target, hook, kind)


def end(original: Callable[..., None], parent_pid: int | None, *rest: Any, **named: Any) -> None:
    """Where a rank has refused to start, end with its reason and status 1.

    Target: ``kill_process_tree``, by which the first process ends itself when a rank has failed;
    status 137, of SIGKILL, would read as a lack of memory. AROUND. Remove when it exits instead.
    """
    is_own = parent_pid == os.getpid() and not rest and named.get("include_parent", True)
    if is_own and is_refused():
        original(parent_pid, include_parent=False)
        repeat_now()
        os._exit(1)
    original(parent_pid, *rest, **named)


class _SchedulerHooks:
    """The hooks of one scheduler process and what they share. Verified with SGLang 0.5.23."""

    def __init__(self, config: BalanceConfig) -> None:
        self._config = config
        self._tokens = PrefillTokens()
        self._flow: SglangFlow | None = None  # of the balanced model
        self._balanced: BalancedLayers | None = None
        self._served_plainly = False  # because on_unsupported is off
        self._is_made = False  # the scheduler, with all that it tries out
        self._is_loading = True  # no prefill of a made scheduler has run

    def by_target(self) -> dict[str, tuple[Callable[..., Any], HookType]]:
        """Return hooks by target; without balancing only what expert parallelism on CPU needs."""
        hooks: dict[str, tuple[Callable[..., Any], HookType]] = {LOAD: (self.load, HookType.AROUND)}
        if is_cpu():
            hooks[COMPUTE] = (self.compute, HookType.AROUND)
        if self._config.policy is not Policy.OFF:
            hooks[GATHER] = (self._tokens.gathered, HookType.AFTER)
            hooks[FORWARD] = (self.forward, HookType.AROUND)
            hooks[SCHEDULER] = (self.scheduler_made, HookType.AFTER)
            hooks[REQUESTS] = (self.requests_processed, HookType.AFTER)
            if not is_cpu():
                hooks[LAUNCH] = (self.launch, HookType.AROUND)
        return hooks

    @repeated_at_exit()
    def load(self, original: Callable[..., None], runner: Any) -> None:
        """Refuse what this CPU cannot compute; take the experts over once their weights are final.

        Target: ``ModelRunner.load_model``, whose loader has run all post-processing when it
        returns. AROUND. Remove when SGLang tells plugins that a model is loaded.
        """
        if is_cpu() and runner.server_args.ep_size > 1:
            checks.check_checkpoint(runner.model_config)
        if self._is_to_balance(runner):
            with self._may_serve_plainly():
                check_hooked_functions()
                settings = resolving_view(runner.server_args)
                checks.check_settings(settings)
                checks.check_mega_moe(settings, self._config)
                require_large_batches(self._config, largest_batch())
        original(runner)
        self.loaded(runner)

    def _is_to_balance(self, runner: Any) -> bool:
        is_off = self._served_plainly or self._config.policy is Policy.OFF
        return not is_off and not runner.is_draft_worker

    @contextmanager
    def _may_serve_plainly(self) -> Iterator[None]:
        """Raise what is refused inside, unless it is to be served plainly."""
        try:
            yield
        except UnsupportedError as error:
            is_primary = get_parallel().tp_rank == 0
            refuse_or_serve_plainly(error, self._config, logger, is_primary=is_primary)
            self._served_plainly = True

    def loaded(self, runner: Any) -> None:
        """Take over the experts of ``runner``'s model; a draft model's stay at home."""
        complete_outputs(runner.model)
        if self._is_to_balance(runner):
            with self._may_serve_plainly():
                self._balanced, self._flow = balance(self._config, runner.model, self._tokens)
                return
        check = checks.check_cpu_execution if is_cpu() else checks.check_draft_layer
        if is_cpu() or self._balanced is not None:
            for layer in expert_layers(runner.model):
                check(layer)
                if is_cpu():
                    layer.dispatcher = new_dispatcher(layer, self._config.least_tokens)

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
        if runner.is_draft_worker or self._balanced is None:
            return original(runner, forward_batch, *rest, **named)
        self._balanced.require_in_place()
        with self._tokens.running(forward_batch):
            output = original(runner, forward_batch, *rest, **named)
            has_prefill = self._tokens.number > 0
        if own_prefill_tokens(forward_batch):
            self._check_all_routed(runner.model)
        if has_prefill and self._is_made and self._is_loading:
            # In the first one, mostly SGLang's own warm-up request, kernels may still compile.
            self._is_loading = False
            self._balanced.end_loading(logger)
        return output

    @repeated_at_exit()
    def _check_all_routed(self, model: Any) -> None:
        """Raise UnsupportedError unless a prefill with tokens has routed every layer.

        A model that computes a layer's experts in a way of its own would take physical ids for
        logical ones. SGLang's warm-up request is the first such batch.
        """
        assert self._flow is not None, "what is not balanced is not routed"
        if self._flow.not_routed:
            name = moe_layers(model)[min(self._flow.not_routed)].layer_name
            raise UnsupportedError(
                f"{name} cannot be balanced: the model did not call it in a prefill, or not "
                "through its dispatcher",
                otherwise=POLICY_OFF,
            )

    def launch(
        self, original: Callable[..., torch.Tensor], experts: FusedMoE, *rest: Any, **named: Any
    ) -> torch.Tensor:
        """Balance a layer that the megakernel computes, and no draft model's.

        Target: ``mega_moe.run_mega_routed_experts``, by which models launch it. AROUND. Remove when
        they call it through a dispatcher.
        """
        stage = None if self._flow is None else self._flow.launches.get(experts)
        call = original if stage is None else partial(stage.launch, original)
        return call(experts, *rest, **named)

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
        return compute(layer, x, topk_output.topk_weights, topk_output.topk_ids)

    @repeated_at_exit()
    def scheduler_made(self, _result: None, scheduler: Any, *_: Any, **__: Any) -> None:
        """Let this rank serve only when it really balances; SGLang only logs failures of plugins.

        Target: ``Scheduler.__init__``, which ends before the first request is taken. AFTER. Raises
        UnsupportedError, which ends the server. Remove when SGLang stops on plugins that fail.
        """
        if self._served_plainly:
            return
        hooks = self.by_target().items()
        missing = [target for target, (hook, _) in hooks if not _is_in_place(target, hook)]
        if missing or self._balanced is None:
            raise UnsupportedError(
                f"SGLang did not apply the hooks on {missing or [LOAD]}; see its log for the reason"
            )
        self._check_adopted(scheduler.tp_worker.model_runner.model)
        self._balanced.mark_ready(logger)
        self._is_made = True

    def requests_processed(self, _result: None, _scheduler: Any, recv_reqs: list[Any]) -> None:
        """Trust no copy that has stayed when weights may have been loaded anew.

        Target: ``Scheduler.process_input_requests``, through which all of them come. AFTER. Remove
        when SGLang tells plugins that weights have changed.
        """
        kinds = {type(request).__name__ for request in recv_reqs}
        if self._balanced is not None and not kinds.issubset(_LEAVING_WEIGHTS.split()):
            self._balanced.balancer.forget()

    def _check_adopted(self, model: Any) -> None:
        """Raise UnsupportedError unless every MoE layer of ``model`` still has its slots."""
        assert self._balanced is not None, "what is not balanced has none"
        if len(moe_layers(model)) != self._balanced.num_layers:
            raise UnsupportedError("layers with experts came after loading; start the server anew")
        self._balanced.require_in_place()


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
