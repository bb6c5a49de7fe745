"""Greedy tokens of a server, generated twice and compared, as with balancing off and on."""

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ultraep_lab.bench.endpoint import Endpoint, json_object
from ultraep_serve.errors import BenchError, ConfigError

__all__ = ["Generation", "TokenComparison", "compare_tokens", "generate"]

_TIMEOUT_SECONDS = 600.0  # of one completion


@dataclass(frozen=True)
class Generation:
    """What a server made of one prompt, greedily. All three have one entry per token made."""

    token_ids: tuple[int, ...] | None  # None where the server does not return them
    tokens: tuple[str, ...]  # each token's own text
    logprobs: tuple[float | None, ...]  # of the chosen tokens, natural logarithm


@dataclass(frozen=True)
class TokenComparison:
    """How far two runs over the same prompts agree."""

    prompts: int
    identical: int  # prompts whose tokens are all the same
    first_differences: tuple[int | None, ...]  # per prompt: position, None where identical
    max_logprob_difference: float  # absolute, over tokens before the first difference

    @property
    def first_difference(self) -> int | None:
        """The earliest position at which any prompt differs; None when all are identical."""
        return min((at for at in self.first_differences if at is not None), default=None)

    def to_json(self, dtype: str) -> dict[str, Any]:
        """For the demo's report and for files; ``dtype`` is what the model was served in."""
        return {
            "dtype": dtype,
            "prompts": self.prompts,
            "identical": self.identical,
            "first_difference": self.first_difference,
            "max_logprob_difference": self.max_logprob_difference,
        }


def generate(
    url: str, model: str, prompts: Sequence[str], max_tokens: int, concurrency: int
) -> list[Generation]:
    """Greedy completions of ``prompts``, in their order, at most ``concurrency`` at a time.

    Every prompt is computed, also one that vLLM has seen before; on a server that does not know
    ``cache_salt``, start it without a prefix cache. Raises ConfigError for ``concurrency`` below 1
    and a ``url`` that is no address, BenchError with the server's words when it refuses a prompt.
    """
    if concurrency < 1:
        raise ConfigError(f"{concurrency = } must be 1 or more")
    with (
        Endpoint("the engine's server", "--url", url, _TIMEOUT_SECONDS) as server,
        ThreadPoolExecutor(concurrency) as pool,
    ):
        futures = [pool.submit(_complete, server, model, text, max_tokens) for text in prompts]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)  # after an error no further prompt is sent


def compare_tokens(first: Sequence[Generation], second: Sequence[Generation]) -> TokenComparison:
    """Compare two runs over the same prompts in the same order.

    Raises BenchError when the runs differ in length or hold no prompt.
    """
    if not first or len(first) != len(second):
        raise BenchError(
            f"runs of {len(first)} and {len(second)} prompts cannot be compared; "
            "generate both from the same prompts, at least one"
        )
    differences, largest = [], 0.0
    for one, other in zip(first, second, strict=True):
        at = _first_difference(_tokens_of(one, other), _tokens_of(other, one))
        differences.append(at)
        largest = max(largest, _logprob_difference(one.logprobs[:at], other.logprobs[:at]))
    return TokenComparison(len(first), differences.count(None), tuple(differences), largest)


def _complete(server: Endpoint, model: str, prompt: str, max_tokens: int) -> Generation:
    request = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "logprobs": 1,
        "return_token_ids": True,  # vLLM; other servers ignore it
        # A prompt answered from the prefix cache of an earlier run would check nothing.
        "cache_salt": uuid.uuid4().hex,
    }
    response = server.call("POST", "/v1/completions", json=request)
    if not response.is_success:
        raise server.refused(response, "look at its log")
    try:
        choice = json_object(response)["choices"][0]
        logprobs = choice["logprobs"]
        tokens, values = logprobs["tokens"], logprobs["token_logprobs"]
    except (KeyError, IndexError, TypeError) as error:
        raise BenchError(
            "the server's completion has no per-token logprobs; compare tokens on a server whose "
            "/v1/completions supports `logprobs`"
        ) from error
    ids = choice.get("token_ids")
    return Generation(tuple(ids) if ids is not None else None, tuple(tokens), tuple(values))


def _tokens_of(generation: Generation, other: Generation) -> Sequence[int] | Sequence[str]:
    """What to compare: ids where both have them (two ids may share a text), else texts."""
    if generation.token_ids is not None and other.token_ids is not None:
        return generation.token_ids
    return generation.tokens


def _first_difference(
    first: Sequence[int] | Sequence[str], second: Sequence[int] | Sequence[str]
) -> int | None:
    """Where the two part; a run that only stops earlier parts at its end."""
    for at, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return at
    return min(len(first), len(second)) if len(first) != len(second) else None


def _logprob_difference(first: Sequence[float | None], second: Sequence[float | None]) -> float:
    pairs = zip(first, second, strict=False)
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=0.0)
