"""The engine's OpenAI-compatible server: models, token counts, time to first token."""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Any

import httpx

from ultraep_lab.bench.endpoint import Endpoint, error_message, json_object, understood
from ultraep_lab.errors import BenchError
from ultraep_serve.errors import ConfigError

_MOST_BYTES = 4 << 20  # of a stream of one token
LONGER_CONTEXT = (
    "choose smaller --prompt-tokens, or start the server with a longer context "
    "(vLLM: --max-model-len, SGLang: --context-length)"
)


@dataclass(frozen=True)
class FirstToken:
    """When the first token of a completion arrived."""

    seconds: float  # from sending the request, which was encoded before
    prompt_tokens: int | None  # as the server counted them; None where it does not say


class Server(Endpoint):
    """One served model. Vocabulary of the wire: OpenAI's completions API, streamed."""

    def __init__(self, url: str, model: str | None = None, timeout_seconds: float = 600.0) -> None:
        """Gets the list of models; ``model`` None takes the first.

        Raises BenchError when it cannot be reached, ConfigError when it does not serve ``model``.
        """
        super().__init__("the engine's server", "--url", url, timeout_seconds)
        try:
            with understood(self.url):
                found = self._found(model)
        except BaseException:
            self.close()
            raise
        self.model = str(found["id"])
        self.root = str(found.get("root") or self.model)  # where the engine loaded it from
        limit = found.get("max_model_len")
        self.context_tokens: int | None = limit if isinstance(limit, int) else None

    def check_context(self, prompt_tokens: int) -> None:
        """Raises ConfigError when a prompt and one new token cannot fit, where that is known."""
        if self.context_tokens is not None and prompt_tokens + 1 > self.context_tokens:
            raise ConfigError(
                f"a prompt of {prompt_tokens} tokens does not fit the server's context of "
                f"{self.context_tokens} tokens; {LONGER_CONTEXT}"
            )

    def check_text(self, text: str) -> None:
        """Raises ConfigError when ``text`` has only a few different tokens.

        All of them would go to the same experts, so such prompts show nothing.
        """
        tokens = self.tokens(text)
        if (different := len(set(map(str, tokens)))) <= len(tokens) // 8:
            raise ConfigError(
                f"{self.model} does not know the words of the prompts ({different} different "
                f"tokens of {len(tokens)}); give a text that it knows with --text-file"
            )

    def tokens(self, text: str) -> list[Any]:
        """The tokens of ``text``. Raises BenchError where the server does not say."""
        response = self.call("POST", "/tokenize", json={"model": self.model, "prompt": text})
        if not response.is_success:
            raise self.refused(response, "measure a vLLM or SGLang server")
        with understood(self.url):
            return list(json_object(response)["tokens"])

    def count_tokens(self, text: str) -> int:
        """How many tokens ``text`` has."""
        return len(self.tokens(text))

    def first_token(self, prompt: str) -> FirstToken:
        """Send ``prompt``, wait for one token, drain the stream.

        Raises BenchError with the server's words when it refuses or ends with an error.
        """
        request = self.build("POST", "/v1/completions", json=self._completion(prompt))
        started = time.perf_counter()
        response = self.send(request)
        if not response.is_success:
            raise self._no_completion(self.whole(response))
        with understood(self.url), closing(self.pieces(response, _MOST_BYTES)) as pieces:
            return self._read_stream(pieces, started)

    def _found(self, model: str | None) -> dict[str, Any]:
        """The entry of ``model``, or the first one, in the list of models."""
        models = {str(one.get("id")): one for one in self._models()}
        name = model if model is not None else next(iter(models))
        if name not in models:
            raise ConfigError(f"--model {name!r} is not served here; choose from {list(models)}")
        return models[name]

    def _models(self) -> list[dict[str, Any]]:
        response = self.call("GET", "/v1/models")
        if not response.is_success:
            raise self._no_completion(response)
        models = json_object(response).get("data")
        if not isinstance(models, list) or not models:
            raise BenchError(
                f"{self.url} serves no model; is {self.flag} an OpenAI-compatible server?"
            )
        return models

    def _completion(self, prompt: str) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _read_stream(self, pieces: Iterable[bytes], started: float) -> FirstToken:
        seconds: float | None = None
        prompt_tokens: int | None = None
        for arrived, chunk in _chunks(pieces):
            if "error" in chunk:
                raise BenchError(f"{self.url} ended a completion with an error: {chunk['error']}")
            if seconds is None and _has_token(chunk):
                seconds = arrived - started
            usage = chunk.get("usage") or {}
            prompt_tokens = usage.get("prompt_tokens", prompt_tokens)
        if seconds is None:
            raise BenchError(f"{self.url} ended a completion without a token; read its log")
        return FirstToken(seconds, prompt_tokens)

    def _no_completion(self, response: httpx.Response) -> BenchError:
        remedy = "read its log"
        if "context" in (words := error_message(response).lower()) or "longer than" in words:
            remedy = LONGER_CONTEXT
        elif response.status_code in (401, 403):
            remedy = "start it without an API key"
        elif response.status_code == 404:
            remedy = f"give the address of an OpenAI-compatible server with {self.flag}"
        return self.refused(response, remedy)


def _chunks(pieces: Iterable[bytes]) -> Iterator[tuple[float, dict[str, Any]]]:
    """(arrival, content) of every server-sent event; arrival is read before parsing."""
    rest = b""
    for piece in chain(pieces, [b"\n"]):
        arrived = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data and data != b"[DONE]":
                yield arrived, _object(data)


def _object(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BenchError(
            f"the server streamed something that is not JSON: {data[:80]!a}"
        ) from error
    return chunk if isinstance(chunk, dict) else {}


def _has_token(chunk: dict[str, Any]) -> bool:
    """Whether a token was made; one without text (an end token) has a finish reason."""
    return any(
        choice.get("text") or choice.get("token_ids") or choice.get("finish_reason")
        for choice in chunk.get("choices") or ()
    )
