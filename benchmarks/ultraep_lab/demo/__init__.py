"""The demo: a made-up model with skewed routing, servers as users start them, and their figures.

Tests and benchmarks use the same models and servers. Making a model needs transformers, tokenizers
and safetensors.
"""
