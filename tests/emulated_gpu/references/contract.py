"""How a reference takes an engine's call: by names, with nothing left out in silence."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch

__all__ = ["of_signature", "refusing", "replace_operators"]

# arguments that say how fast something is to be, or what it is beside that; none changes a result
_WITHOUT_EFFECT = {
    *("max_seqlen_q", "max_seqlen_k", "scheduler_metadata", "num_splits", "pack_gqa", "sm_margin"),
    *("seq_threshold_3D", "num_par_softmax_segments", "use_td"),
    *("workspace", "use_atomic_add", "use_fp32_reduce", "thread_k", "thread_n", "blocks_per_sm"),
    *("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum"),
    *("k_scale", "v_scale", "q_descale", "k_descale", "v_descale"),  # of caches that are refused
    *("cp_rank", "cp_tot_seqused_k", "rswa_window", "mm_prefix_clamp_sliding_window"),  # without
    *("is_rotary_interleaved", "dummy_is_scale_transposed", "dummy_is_tma_aligned"),
    *("max_len_extend", "extend_seq_lens_cpu", "mask_indptr", "uneven_batch", "enable_lean"),
    *("attn_logits", "attn_lse", "num_kv_splits", "max_kv_splits"),
    *("lean_Mp", "lean_Lp", "lean_Op", "lean_locks"),  # of AMD's GPUs
    *("enable_pdl", "use_pdl", "cumsum_buffer", "pad_sorted_token_ids"),
}
_UNSET = (None, False, 0, 0.0)
_libraries: list[torch.library.Library] = []  # registrations last as long as these


def replace_operators(
    namespace: str, references: Mapping[str, Callable[..., Any]], kept: Sequence[str]
) -> None:
    """Put references in the place of what an engine has compiled for CUDA, refusing all others.

    ``kept`` look at no values.
    """
    library = torch.library.Library(namespace, "IMPL")
    _libraries.append(library)
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        space, _, own = name.partition("::")
        if space != namespace or own in kept:
            continue
        function = refusing(name)
        if own in references:
            schema = torch._C._get_schema(name.partition(".")[0], name.partition(".")[2])
            function = _of_operator(schema, references[own])
        library.impl(own, function, "CUDA")


def _of_operator(schema: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` in the place of the operator with ``schema``."""
    defaults = {
        each.name: each.default_value for each in schema.arguments if each.has_default_value()
    }
    return _by_name(schema.name, [each.name for each in schema.arguments], defaults, function)


def of_signature(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` in the place of an engine's function in Python."""
    parameters = inspect.signature(original).parameters
    defaults = {
        name: each.default for name, each in parameters.items() if each.default is not each.empty
    }
    return wraps(original)(_by_name(original.__name__, [*parameters], defaults, function))


def refusing(name: str) -> Callable[..., Any]:
    """What is called in the place of an operator that has no reference."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the emulated GPU has no values for {name}")

    return refuse


def _by_name(
    what: str, names: list[str], defaults: Mapping[str, Any], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Pass what ``function`` takes; refuse a call in which another argument is set.

    One that takes ``**others`` is given nothing of them.
    """
    parameters = inspect.signature(function).parameters
    taken = [name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD]
    if missing := [name for name in taken if name not in names]:
        raise TypeError(f"{what} has no arguments {missing}: its reference is another version's")
    others = {*names} - {*taken} - _WITHOUT_EFFECT if len(taken) == len(parameters) else set()

    def call(*args: Any, **named: Any) -> Any:
        given = {**defaults, **dict(zip(names, args, strict=False)), **named}
        for name in others & given.keys():
            if not _is_unset(given[name], defaults.get(name)):
                raise NotImplementedError(f"the emulated GPU has no values for {what} with {name}")
        return function(**{name: given[name] for name in taken if name in given})

    return call


def _is_unset(value: Any, default: Any) -> bool:
    """Whether an argument asks for nothing."""
    is_plain = isinstance(value, (type(None), bool, int, float, str))
    return is_plain and (value == default or value in _UNSET)
