"""A trace file -> the prefill batches of one model, or a clear error where they do not fit."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ultraep_serve.costs.shapes import ModelShape
from ultraep_serve.errors import ConfigError
from ultraep_serve.traces import PREFILL, LoadTrace, Trace, batches, load_trace, of_phase
from ultraep_serve.types import IntArray

__all__ = ["prefill_batches"]

REMEDY = "give the --model-config of the traced model"


def prefill_batches(
    path: Path, shape: ModelShape, batch_tokens: int | None, num_ranks: int
) -> Iterator[IntArray]:
    """Loads (layers, R, E) of each prefill batch; decode is left out where the trace marks it.

    Raises:
        TraceError: the file cannot be read, has no prefill, or no whole batch of it.
        ConfigError: it is of a model with other experts, experts per token or layers.
    """
    trace = load_trace(path)
    _check(trace, shape)
    if isinstance(trace, Trace):
        trace = replace(trace, num_experts=shape.num_experts)
        if batch_tokens is None:
            raise ConfigError(
                "a trace of tokens needs --batch-tokens, the tokens that all ranks together take "
                "in one prefill batch (8192, say)"
            )
    return batches(of_phase(trace, PREFILL), batch_tokens, num_ranks)


def _check(trace: Trace | LoadTrace, shape: ModelShape) -> None:
    if isinstance(trace, LoadTrace) or "num_experts" in trace.metadata:
        fits = trace.num_experts == shape.num_experts
    else:
        fits = trace.num_experts <= shape.num_experts  # the highest may never have been chosen
    if not fits:
        raise ConfigError(
            f"the trace has {trace.num_experts} experts, {shape.name} has {shape.num_experts}; "
            f"{REMEDY}"
        )
    if isinstance(trace, Trace) and trace.topk_ids.shape[2] != shape.experts_per_token:
        raise ConfigError(
            f"the trace has {trace.topk_ids.shape[2]} experts per token, {shape.name} has "
            f"{shape.experts_per_token}; {REMEDY}"
        )
    if not 1 <= trace.num_layers <= shape.num_moe_layers:
        raise ConfigError(
            f"the trace has {trace.num_layers} MoE layers, {shape.name} has "
            f"{shape.num_moe_layers}; {REMEDY}"
        )
