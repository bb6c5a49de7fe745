"""A layer's expert weights: what programs find in it, and what its kernel computes with.

Programs read, save, check and load weights by the names of a layer's parameters. With slots behind
them they would find copies there, which change with every prompt, in shapes that no checkpoint has.
So a layer has parameters of its masters alone, in the memory where they are computed from, and only
its kernel gets those that have slots.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from torch import nn

from ultraep_serve.errors import UnsupportedError

Layer = TypeVar("Layer", bound=nn.Module)  # an engine's MoE layer


class ExpertWeights(Generic[Layer]):
    """The tensors that make up the experts of one layer."""

    def __init__(self, layer: Layer, parameters: Sequence[nn.Parameter]) -> None:
        """``parameters`` (L, ...) of ``layer``; they get rows for slots while ranks meet."""
        self.layer, self.parameters = layer, parameters
        movable = {id(parameter) for parameter in parameters}
        self._held = layer._parameters
        self._with_slots = {
            name: own for name, own in self._held.items() if own is not None and id(own) in movable
        }
        self._masters: dict[str, nn.Parameter] = {}
        self._showing = 0  # micro-batches whose experts are being computed

    def hide_slots(self, num_masters: int, kernel: Callable[[Layer], object]) -> None:
        """From now on, have the layer show masters; remember what computes it, by ``kernel``."""
        for name, own in self._with_slots.items():
            self._masters[name] = _first_rows(own, num_masters)
        self._held.update(self._masters)
        self._kernel, self._expected = kernel, self._now(kernel)

    def show_slots(self) -> None:
        """Have the layer show slots too, for a kernel that takes its tensors from the layer.

        Until ``masters_alone``, which is called as often: micro-batches may overlap.
        """
        self._showing += 1
        self._held.update(self._with_slots)

    def masters_alone(self) -> None:
        """End what ``show_slots`` began."""
        self._showing -= 1
        if not self._showing:
            self._held.update(self._masters)

    def require_in_place(self) -> None:
        """Raise UnsupportedError if weights or kernel are no longer those that have slots.

        Engines can load weights anew while they serve. What is loaded into the same memory is
        balanced as it is; what is made anew has no slots.
        """
        if self._now(self._kernel) != self._expected:
            name = getattr(self.layer, "layer_name", type(self.layer).__name__)
            raise UnsupportedError(
                f"{name} is not balanced: its weights were replaced after loading; "
                "start the server anew",
                otherwise="",
            )

    def _now(self, kernel: Callable[[Layer], object]) -> list[int]:
        found = (self._held.get(name) for name in self._masters)
        addresses = [0 if own is None else own.data_ptr() for own in found]
        return [id(kernel(self.layer)), *addresses]


def _first_rows(parameter: nn.Parameter, number: int) -> nn.Parameter:
    """A parameter with the memory, class and attributes of ``parameter``: loaders go by both."""
    rows = parameter.data[:number]
    rows.__class__ = type(parameter)
    vars(rows).update(vars(parameter))
    return rows  # type: ignore[return-value]
