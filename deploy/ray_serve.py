"""Ray Serve with two replicas of vLLM, each balanced over ranks of its own.

    serve run deploy.ray_serve:app model=MODEL gpus=2     # gpus=0: on CPU

A request is ``{"prompts": [...], "max_tokens": 16}``, its answer the list of texts.
"""

import asyncio
from typing import Any

from pydantic import BaseModel
from ray import serve
from ray.serve import Application
from starlette.requests import Request

ENGINE = {
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "distributed_executor_backend": "mp",  # ranks as processes of the replica
    "additional_config": {"ultraep": {}},
}


class Options(BaseModel):
    """What ``serve run`` takes behind the application's name."""

    model: str
    gpus: int = 2  # of each replica, one for each rank; 0: two ranks on CPU
    replicas: int = 2


class Replica:
    """One engine; it answers a request at a time, all prompts of it as one batch."""

    def __init__(self, model: str, **arguments: Any) -> None:
        """Start vLLM; ``arguments`` override those above."""
        from vllm import LLM  # noqa: TID251

        self._engine = LLM(model, **{**ENGINE, **arguments})

    def generate(self, prompts: list[str], max_tokens: int) -> list[str]:
        """The most likely continuation of every prompt."""
        from vllm import SamplingParams  # noqa: TID251

        greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
        done = self._engine.generate(prompts, greedy, use_tqdm=False)
        return [request.outputs[0].text for request in done]

    async def __call__(self, request: Request) -> list[str]:
        """Answer over HTTP."""
        asked = await request.json()
        return await asyncio.to_thread(self.generate, asked["prompts"], asked["max_tokens"])


def deployed(replica: type[Replica], options: Options) -> serve.Deployment:
    """``replica`` as many times as ``options`` say, each with GPUs of its own."""
    return serve.deployment(
        replica,
        num_replicas=options.replicas,
        max_ongoing_requests=1,
        ray_actor_options={"num_cpus": 1, "num_gpus": options.gpus},
    )


def app(options: Options) -> Application:
    """The application that ``serve run`` deploys."""
    size = options.gpus or 2
    return deployed(Replica, options).bind(options.model, tensor_parallel_size=size)
