"""How many tokens a batch brings over all ranks; every rank must know the same number."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

__all__ = ["PrefillTokens"]

_PREFILL = (ForwardMode.EXTEND, ForwardMode.MIXED)


class PrefillTokens:
    """Of the batch that runs now; 0 where it is not prefill, which is always too small to plan.

    Ranks of one attention group run the same batch. With attention data parallelism every rank has
    a batch of its own, of decode or with nothing in it while another one's is prefill: then all
    their numbers count, which SGLang's schedulers gather before they run anything.
    """

    def __init__(self) -> None:
        self.number = 0
        self._gathered = 0

    def gathered(self, _result: None, info: Any, *_: Any, **__: Any) -> None:
        """Hear of all ranks' tokens.

        Target: ``MLPSyncBatchInfo.all_gather``, behind which every rank has the same. AFTER. A
        batch itself only tells them where dense layers gather tokens too. Remove when it always
        does.
        """
        self._gathered = sum(info.global_num_tokens)

    @contextmanager
    def running(self, forward_batch: Any) -> Iterator[None]:
        """While SGLang runs ``forward_batch``. What it captures or tries out by itself counts 0."""
        self.number = self._of(forward_batch)
        try:
            yield
        finally:
            self.number = 0

    def _of(self, forward_batch: Any) -> int:
        if get_parallel().attn_dp_size > 1:
            return self._gathered if forward_batch.is_extend_in_batch else 0
        if forward_batch.forward_mode in _PREFILL:
            return int(forward_batch.extend_num_tokens or 0)
        return 0
