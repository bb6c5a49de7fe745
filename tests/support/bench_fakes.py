"""Fakes for the benchmark's tests: an engine server and a sidecar that share one policy."""

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

TOKEN = "secret"
NOTHING = dict.fromkeys(("mean", "p50", "p99", "max"))
IMBALANCE = {
    "before": {"mean": 1.5, "p50": 1.5, "p99": 1.9, "max": 2.0},
    "after": {"mean": 1.01, "p50": 1.01, "p99": 1.02, "max": 1.03},
}
SPENT_SECONDS = 0.001


@dataclass
class FakeDeployment:
    """What the fakes do, and the requests they got."""

    policy: str | None = "quota"  # None: started without balancing
    allow_ideal: bool = True
    context: int | None = 4096  # as /v1/models says
    hidden_context: int | None = None  # as only a refused request says
    one_token: bool = False  # a tokenizer that knows no word
    fail_after: int | None = None  # completions until the stream breaks off with an error
    doubt: str = ""  # why balancing has switched itself off
    balanced: bool = True  # whether the sidecar has records
    delays: dict[str, float] = field(
        default_factory=lambda: {"off": 0.06, "quota": 0.03, "ideal": 0.01}
    )
    prompts: list[tuple[str, str]] = field(default_factory=list)  # (policy, prompt)
    salts: list[str | None] = field(default_factory=list)  # of completions
    policies_set: list[str] = field(default_factory=list)
    url: str = ""
    sidecar_url: str = ""

    def reset(self) -> None:
        """As made, at the same addresses."""
        addresses = {name: vars(self)[name] for name in vars(self) if name.endswith("url")}
        vars(self).update(vars(FakeDeployment(**addresses)))


def tokenize(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def engine_app(fake: FakeDeployment) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "fake/model", "max_model_len": fake.context, "root": "/none"}]}

    @app.post("/tokenize")
    async def count(request: Request) -> JSONResponse:
        words = tokenize((await request.json())["prompt"])
        ids = [3] * len(words) if fake.one_token else [hash(word) for word in words]
        return JSONResponse({"count": len(words), "tokens": ids})

    @app.post("/v1/completions")
    async def complete(request: Request) -> Any:
        body = await request.json()
        fake.salts.append(body.get("cache_salt"))
        fake.prompts.append((str(fake.policy), body["prompt"]))
        number = len(tokenize(body["prompt"]))
        if fake.hidden_context is not None and number >= fake.hidden_context:
            message = f"This model's maximum context length is {fake.hidden_context} tokens."
            return JSONResponse({"error": {"message": message}}, 400)
        if not body.get("stream"):
            return completion(body)
        broken = fake.fail_after is not None and len(fake.prompts) > fake.fail_after
        return StreamingResponse(
            events(fake.delays[str(fake.policy)], number, broken), media_type="text/event-stream"
        )

    return app


async def events(delay: float, prompt_tokens: int, broken: bool) -> AsyncIterator[str]:
    # A chunk without a token comes at once and must not stop the clock.
    yield f"data: {json.dumps({'choices': [{'text': '', 'finish_reason': None}]})}\n\n"
    await asyncio.sleep(delay)
    if broken:
        yield f"data: {json.dumps({'error': {'message': 'worker died'}})}\n\n"
    else:
        yield f"data: {json.dumps({'choices': [{'text': 'x', 'finish_reason': 'length'}]})}\n\n"
        yield f"data: {json.dumps({'choices': [], 'usage': {'prompt_tokens': prompt_tokens}})}\n\n"
    yield "data: [DONE]\n\n"


def completion(body: dict[str, Any]) -> dict[str, Any]:
    """Echo the prompt's first words as tokens, with logprobs that follow from their lengths."""
    words = tokenize(body["prompt"])[: body["max_tokens"]]
    own = [-float(len(word)) for word in words]
    likeliest = [{word: value, "other": value - 1} for word, value in zip(words, own, strict=True)]
    logprobs = {"tokens": words, "token_logprobs": own, "top_logprobs": likeliest}
    return {"choices": [{"text": " ".join(words), "logprobs": logprobs}]}


def sidecar_app(fake: FakeDeployment) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/control/policy")
    async def control(request: Request) -> JSONResponse:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return JSONResponse({"detail": "wrong token"}, 401)
        if fake.policy is None:
            return JSONResponse({"detail": "no control page"}, 409)
        policy = (await request.json())["policy"]
        if policy == "ideal" and not fake.allow_ideal:
            return JSONResponse({"detail": "policy ideal is not allowed"}, 409)
        fake.policy = policy
        fake.policies_set.append(policy)
        return JSONResponse({"policy": policy})

    @app.get("/v1/balance")
    async def balance() -> dict[str, Any]:
        records = sum(policy == "quota" for policy, _ in fake.prompts)
        layer = {"layer": 0, "records": records, "imbalance": IMBALANCE}
        return {
            "status": "unbalanced" if fake.doubt else "ready",
            "reasons": {"run": fake.doubt} if fake.doubt else {},
            "policy": fake.policy,
            "imbalance": IMBALANCE if fake.balanced else {"before": NOTHING, "after": NOTHING},
            "layers": [layer] if fake.balanced else [],
            "num_ranks": 2,
            "savings": {"spent_seconds": SPENT_SECONDS if fake.balanced else 0.0},
        }

    return app


@contextlib.contextmanager
def serving(app: FastAPI, **settings: Any) -> Iterator[str]:
    """Serve ``app`` on a free port of this machine, by uvicorn's ``settings``; its address."""
    settings = {"log_level": "error", "lifespan": "off", "ws": "none", **settings}
    server = uvicorn.Server(uvicorn.Config(app, port=0, **settings))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            thread.join(0.005)
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


@contextlib.contextmanager
def deployed(fake: FakeDeployment) -> Iterator[FakeDeployment]:
    """All fakes, reachable at the addresses they are given."""
    with serving(engine_app(fake)) as fake.url, serving(sidecar_app(fake)) as fake.sidecar_url:
        yield fake
