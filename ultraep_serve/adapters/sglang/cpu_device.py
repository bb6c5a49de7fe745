"""What SGLang asks of torch's CPU device module as if it were a GPU's."""

import torch

__all__ = ["complete_device_module"]


def complete_device_module() -> None:
    """Give ``torch.cpu`` the functions that SGLang's expert recorder calls, where it has none.

    Target: ``torch.get_device_module()`` in ``eplb.expert_distribution``. There are no graphs to
    capture and no cache to empty on CPU. Verified with SGLang 0.5.23 and torch 2.13. Remove when
    torch has them or SGLang asks first.
    """
    for name, function in (("is_current_stream_capturing", _false), ("empty_cache", _nothing)):
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)


def _false() -> bool:
    return False


def _nothing() -> None:
    return None
