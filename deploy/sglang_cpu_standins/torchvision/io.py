"""Names that transformers imports; images cannot be decoded."""

from enum import Enum
from typing import NoReturn


class ImageReadMode(Enum):
    """Colour modes; only the name is ever needed."""

    UNCHANGED = 0


def decode_image(*_: object, **__: object) -> NoReturn:
    """Raises: there is nothing to decode images with."""
    raise NotImplementedError("image inputs need torchvision, which is not installed")
