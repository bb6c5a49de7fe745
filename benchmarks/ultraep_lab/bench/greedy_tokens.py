"""Greedy tokens of a server, generated twice and compared, as with balancing off and on."""

import math
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ultraep_lab.bench.endpoint import Endpoint, json_object
from ultraep_lab.errors import BenchError
from ultraep_serve.errors import ConfigError

LIKELIEST = 5  # tokens whose log-probabilities are asked for, at each position
ROUNDING = 1e-4  # between log-probabilities in float32
_TIMEOUT_SECONDS = 600.0  # of one completion


class Generation(NamedTuple):
    """What an engine made of one prompt, greedily."""

    tokens: Sequence[str]  # by id where the engine tells it (two ids may share a text), else text
    likeliest: Sequence[Mapping[str, float]]  # per token: log-probabilities of it and the next best


@dataclass(frozen=True)
class TokenComparison:
    """How far two runs over the same prompts agree."""

    prompts: int
    identical: int  # prompts whose tokens are all the same
    ties: int  # prompts whose tokens part where both choices are as likely, but for rounding
    first_difference: int | None  # the earliest position where a prompt differs, ties left out
    max_logprob_difference: float  # of what either run chose, until they part

    @property
    def same(self) -> int:
        """Prompts whose tokens are the same, but for ties."""
        return self.identical + self.ties

    def to_json(self, dtype: str) -> dict[str, Any]:
        """For the demo's report and for files; ``dtype`` is what the model was served in."""
        return {"dtype": dtype, **asdict(self)}


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

    Two tokens are a tie where in both runs their log-probabilities differ by ``ROUNDING`` at most.
    Raises BenchError when the runs differ in length or hold no prompt.
    """
    if not first or len(first) != len(second):
        raise BenchError(
            f"runs of {len(first)} and {len(second)} prompts cannot be compared; "
            "generate both from the same prompts, at least one"
        )
    differences, identical, ties, largest = [], 0, 0, 0.0
    for one, other in zip(first, second, strict=True):
        at = _first_difference(one.tokens, other.tokens)
        if at is None:
            identical += 1
        elif _is_tie(one, other, at):
            ties += 1
        else:
            differences.append(at)
        largest = max(largest, _logprob_difference(one, other, at))
    return TokenComparison(len(first), identical, ties, min(differences, default=None), largest)


def _complete(server: Endpoint, model: str, prompt: str, max_tokens: int) -> Generation:
    request = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "logprobs": LIKELIEST,
        "return_tokens_as_token_ids": True,  # vLLM; other servers ignore it
        # A prompt answered from the prefix cache of an earlier run would check nothing.
        "cache_salt": uuid.uuid4().hex,
    }
    response = server.call("POST", "/v1/completions", json=request)
    if not response.is_success:
        raise server.refused(response, "look at its log")
    try:
        logprobs = json_object(response)["choices"][0]["logprobs"]
        tokens, best = logprobs["tokens"], logprobs["top_logprobs"]
        own = [float(value) for value in logprobs["token_logprobs"]]
        likeliest = [{**best[at], token: own[at]} for at, token in enumerate(tokens)]
    except (KeyError, IndexError, TypeError) as error:
        raise BenchError(
            "the server's completion has no per-token logprobs; compare tokens on a server whose "
            "/v1/completions supports `logprobs`"
        ) from error
    return Generation(tokens, likeliest)


def _first_difference(first: Sequence[str], second: Sequence[str]) -> int | None:
    """Where the two part; a run that only stops earlier parts at its end."""
    for at, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return at
    return min(len(first), len(second)) if len(first) != len(second) else None


def _is_tie(one: Generation, other: Generation, at: int) -> bool:
    """Whether both runs find the tokens at ``at`` equally likely; never where one run has ended."""
    if at == min(len(one.tokens), len(other.tokens)):
        return False
    pair = one.tokens[at], other.tokens[at]
    chances = [[run.likeliest[at].get(token, -math.inf) for token in pair] for run in (one, other)]
    return all(abs(mine - its) <= ROUNDING for mine, its in chances)


def _logprob_difference(one: Generation, other: Generation, at: int | None) -> float:
    """The largest between the tokens that either run chose, up to ``at`` and with it."""
    end = None if at is None else at + 1
    chosen = zip(one.tokens[:end], other.tokens[:end], strict=False)
    likeliest = zip(one.likeliest, other.likeliest, strict=False)
    return max(
        (
            abs(mine[token] - its[token])
            for pair, (mine, its) in zip(chosen, likeliest, strict=False)
            for token in pair
            if token in mine and token in its
        ),
        default=0.0,
    )
