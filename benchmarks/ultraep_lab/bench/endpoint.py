"""Requests to an HTTP server; whatever goes wrong is an error that says what to do."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from ultraep_lab.errors import BenchError
from ultraep_serve.errors import ConfigError, UltraEPError

Self = TypeVar("Self", bound="Endpoint")
CONNECT_SECONDS = 5.0
MESSAGE_CHARACTERS = 400  # of the server's own words, at most
MOST_BYTES = 64 << 20  # of an answer


class Endpoint:
    """Requests to one server; ``flag`` is the command line flag that names its address."""

    how_to_start = "start it with `ultraep-serve vllm MODEL` (or sglang)"

    def __init__(self, name: str, flag: str, url: str, timeout_seconds: float) -> None:
        """Raises ConfigError when ``url`` is no http(s) address."""
        self.name, self.flag, self.url = name, flag, url.rstrip("/").removesuffix("/v1")
        try:
            address = httpx.URL(self.url)
            address.host.encode("idna")  # as it will be looked up
        except (httpx.InvalidURL, UnicodeError) as error:
            raise ConfigError(f"{flag} = {url!r} is not an address: {error}") from error
        is_port = address.port is None or 0 < address.port < 1 << 16
        if address.scheme not in ("http", "https") or not address.host or not is_port:
            raise ConfigError(f"{flag} = {url!r} must be http://HOST:PORT")
        self._client = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(timeout_seconds, connect=CONNECT_SECONDS),
            headers={"Accept-Encoding": "identity"},  # no decompression inside measured time
            trust_env=False,  # a proxy from the environment would be measured as well
        )

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; the endpoint is of no use afterwards."""
        self._client.close()

    def build(self, method: str, path: str, **content: Any) -> httpx.Request:
        """A request ready to be sent, so that encoding it costs no measured time."""
        return self._client.build_request(method, path, **content)

    def send(self, request: httpx.Request) -> httpx.Response:
        """Send ``request`` and do not read the body, which ``pieces`` does.

        Raises BenchError when no response came.
        """
        try:
            return self._client.send(request, stream=True)
        except httpx.RequestError as error:
            raise self.unreachable(error) from error

    def call(self, method: str, path: str, **content: Any) -> httpx.Response:
        """The whole response, whatever its status. Raises BenchError when none came in time."""
        return self.whole(self.send(self.build(method, path, **content)))

    def whole(self, response: httpx.Response) -> httpx.Response:
        """``response`` with its body."""
        body = b"".join(self.pieces(response))
        return httpx.Response(response.status_code, content=body, request=response.request)

    def pieces(
        self, response: httpx.Response, most: int = MOST_BYTES
    ) -> Generator[bytes, None, None]:
        """The body as it arrives; it is closed at the end. Raises BenchError beyond ``most``."""
        read = 0
        try:
            for piece in response.iter_raw():
                read += len(piece)
                if read > most:
                    path = response.request.url.path
                    raise BenchError(
                        f"{self.name} at {self.url} answered {path} with more than "
                        f"{most} bytes; is that the right address?"
                    )
                yield piece
        except httpx.RequestError as error:
            raise self.unreachable(error) from error
        finally:
            response.close()

    def unreachable(self, error: httpx.RequestError) -> BenchError:
        """The error for a server that did not answer."""
        if isinstance(error, httpx.ReadTimeout):
            return BenchError(
                f"{self.name} at {self.url} did not answer in time; read its log, or raise "
                "--timeout"
            )
        return BenchError(
            f"{self.name} at {self.url} cannot be reached ({str(error) or type(error).__name__}); "
            f"{self.how_to_start}, or give its address with {self.flag}"
        )

    def refused(self, response: httpx.Response, remedy: str) -> BenchError:
        """The error for an answer other than success."""
        path = response.request.url.path
        return BenchError(
            f"{self.name} at {self.url} answered {path} with {response.status_code}: "
            f"{error_message(response)}; {remedy}"
        )


def error_message(response: httpx.Response) -> str:
    """The server's own words: OpenAI's ``error.message``, FastAPI's ``detail``, or the text."""
    try:
        body = response.json()
    except (ValueError, RecursionError):
        body = response.text
    if isinstance(body, dict):
        body = body.get("error", body.get("detail", body))
    if isinstance(body, dict):
        body = body.get("message", body)
    return " ".join(str(body).split())[:MESSAGE_CHARACTERS] or "no reason given"


def json_object(response: httpx.Response) -> dict[str, Any]:
    """The body as a JSON object. Raises BenchError when it is something else.

    NaN and Infinity are no JSON.
    """
    try:
        body = response.json(parse_constant=_no_number)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise BenchError(
            f"{response.request.url} did not answer with a JSON object; is that the right address?"
        )
    return body


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


@contextmanager
def understood(url: str) -> Iterator[None]:
    """Inside, answers of ``url`` are used: where one has another form, that is a BenchError."""
    try:
        yield
    except UltraEPError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise BenchError(
            f"{url} gave an answer that is not understood ({error!r}); is it the right address, "
            "of a server of a known version?"
        ) from error
