"""torch's own samples of its operators, on the emulated GPU against the CPU.

Forward only, in float32 or in the first type that an operator takes. Operators that draw random
numbers are left out, and so are those whose samples are of values nobody has written (``empty``).
"""

import warnings
from collections import Counter
from typing import Any

import torch

__all__ = ["check_operators"]

MOST_SAMPLES = 4  # of an operator
WITHOUT_VALUES = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    *("resize_", "resize_as_", "as_strided"),
}


def check_operators() -> dict[str, Any]:
    """How many are right and refused. Raises RuntimeError if a value is wrong."""
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    counts, wrong = Counter[str](), []
    for operator in op_db:
        if operator.name in WITHOUT_VALUES or _is_random(operator):
            continue
        dtypes = operator.supported_dtypes("cpu") & operator.supported_dtypes("cuda")
        dtype = torch.float32 if torch.float32 in dtypes else min(dtypes, key=str, default=None)
        if dtype is None:
            continue
        outcomes = _outcomes(operator, dtype)
        counts.update(outcomes)
        counts["operators"] += bool(outcomes)
        if outcomes["wrong"]:
            wrong.append(operator.full_name)
    if wrong:
        raise RuntimeError(f"wrong values: {wrong}")
    return dict(counts)


def _is_random(operator: Any) -> bool:
    names = ("rand", "normal", "dropout", "bernoulli", "multinomial", "cauchy", "exponential")
    others = ("geometric", "uniform", "rrelu", "fractional_max_pool", "pca_lowrank", "svd_lowrank")
    return any(each in operator.name for each in names + others)


def _outcomes(operator: Any, dtype: torch.dtype) -> Counter[str]:
    """Samples that were right, wrong, refused, or failed on both."""
    found = Counter[str]()
    for number, sample in enumerate(operator.sample_inputs("cpu", dtype)):
        if number == MOST_SAMPLES:
            break
        on_gpu = sample.transform(_to_gpu)
        try:
            expected = operator.op(sample.input, *sample.args, **sample.kwargs)
        except Exception:
            continue  # nothing to compare with
        try:
            given = operator.op(on_gpu.input, *on_gpu.args, **on_gpu.kwargs)
        except Exception as error:
            found["refused" if "the emulated GPU has no values" in str(error) else "raised"] += 1
            continue
        found["right" if _are_close(given, expected) else "wrong"] += 1
    return found


def _to_gpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cuda")
    return value.detach().cuda() if isinstance(value, torch.Tensor) else value


def _are_close(found: Any, expected: Any) -> bool:
    """Also of trees of tensors, and of what has none."""
    same = {"check_device": False, "check_layout": False, "check_stride": False, "equal_nan": True}
    if isinstance(found, torch.Tensor) and found.element_size() == 1 and found.is_floating_point():
        found, expected = found.float(), expected.float()
    try:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, **same)
    except AssertionError:
        return False
    except TypeError:  # not of tensors and numbers
        return True
    return True
