"""Answers whose fields are explained by the text below each of them."""

from typing import Any, ClassVar

__all__ = ["Documented"]


class Documented:
    """Base of dataclasses that the HTTP interface answers with."""

    # pydantic looks for this name; it puts the text below a field into the OpenAPI document.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"use_attribute_docstrings": True}
