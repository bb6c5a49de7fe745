"""Made-up models and texts for tests, demos and benchmarks.

Importing this needs torch and numpy; making a model needs transformers, tokenizers and safetensors.
"""

from ultraep_serve.testing.models import LayerReport, ModelReport, make_model, measure_model
from ultraep_serve.testing.spec import (
    ModelSpec,
    demo_balanced,
    demo_glm4,
    demo_qwen3,
    tiny_glm4,
    tiny_qwen3,
)
from ultraep_serve.testing.text import sample_text

__all__ = [
    "LayerReport",
    "ModelReport",
    "ModelSpec",
    "demo_balanced",
    "demo_glm4",
    "demo_qwen3",
    "make_model",
    "measure_model",
    "sample_text",
    "tiny_glm4",
    "tiny_qwen3",
]
