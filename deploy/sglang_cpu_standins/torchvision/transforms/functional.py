"""Names that transformers and SGLang import; images cannot be transformed."""

from enum import Enum
from typing import NoReturn


class InterpolationMode(Enum):
    """torchvision's names and values, which transformers keeps in tables."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def pil_to_tensor(*_: object, **__: object) -> NoReturn:
    """Raises: there is nothing to convert images with."""
    raise NotImplementedError("image inputs need torchvision, which is not installed")
