"""What a token takes in a model's KV cache, from the sizes in its Hugging Face ``config.json``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ultraep_serve.errors import ConfigError
from ultraep_serve.system.files import read_object

__all__ = ["kv_bytes_of", "kv_bytes_per_token"]

_VALUE_BYTES = 2  # of one cached value, BF16
_MOST = 1 << 20  # of any size; no model has more


def kv_bytes_per_token(model: str) -> int:
    """Bytes that one token takes in the BF16 caches of all layers of the checkpoint ``model``.

    Raises ConfigError: there is no configuration, or it lacks a size.
    """
    return kv_bytes_of(read_object(Path(model, "config.json"), "the model's configuration"))


def kv_bytes_of(config: Mapping[str, Any]) -> int:
    """The same of a configuration. Raises ConfigError where a size is no positive whole number."""
    config = config.get("text_config") or config  # multimodal models nest the language model
    if not isinstance(config, Mapping):
        raise ConfigError("text_config of the model's configuration must be a JSON object")
    layers = _size(config, "num_hidden_layers")
    return _VALUE_BYTES * layers * _values_per_layer(config)


def _values_per_layer(config: Mapping[str, Any]) -> int:
    """Cached values of a token in one layer: keys and values, or what both are made of."""
    if config.get("kv_lora_rank"):
        return _size(config, "kv_lora_rank") + _size(config, "qk_rope_head_dim")
    heads = _size(config, "num_attention_heads")
    head_size = _size(config, "head_dim", _size(config, "hidden_size") // heads)
    return 2 * _size(config, "num_key_value_heads", heads) * head_size


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        raise ConfigError(f"{name} = {value!r} must be a whole number, 1 to {_MOST}")
    return value
