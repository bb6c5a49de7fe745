"""Names that transformers and SGLang import; images cannot be transformed."""

from torchvision.transforms import functional
from torchvision.transforms.functional import InterpolationMode

__all__ = ["InterpolationMode", "functional"]
