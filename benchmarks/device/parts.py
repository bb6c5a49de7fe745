"""What there is to run, the most important first."""

from dataclasses import dataclass

__all__ = ["PARTS", "Part"]


@dataclass(frozen=True)
class Part:
    """A module with ``run(bench, report, *arguments)``."""

    name: str
    module: str
    seconds: float  # it may take on a GPU, compilation included
    arguments: tuple[str | int, ...] = ()


PARTS = (
    Part("routing", "routing", 180),
    Part("layer-qwen3", "layer", 120, ("qwen3-235b-a22b", 16)),
    Part("stream", "stream", 90),
    Part("layer-deepseek", "layer", 150, ("deepseek-v3", 64)),
    Part("processes", "processes", 150),
    Part("slots", "slots", 60),
    Part("balancer", "balancer", 90),
    Part("exchange", "exchange", 60),
)
