"""The demo: a made-up model with skewed routing, a server as users start it, and its figures.

Tests and benchmarks use the same models and server. Making a model needs transformers, tokenizers
and safetensors.
"""
