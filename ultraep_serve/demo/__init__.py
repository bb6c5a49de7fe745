"""The demo: a made-up model with skewed routing, a server as a user starts it, and its figures.

Tests and benchmarks use the same models and server. Making a model needs transformers, tokenizers
and safetensors.
"""
