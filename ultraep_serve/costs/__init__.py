"""Costs: what a layer takes, when moving weights pays, what a machine would gain.

Needs NumPy only. ``advice`` and ``plots`` go further and are imported by those who want them.
"""

from ultraep_serve.costs.decide import (
    Transfer,
    break_even_tokens,
    pick_relay,
    residual_imbalance,
    saved_picoseconds,
    transfer_of,
    worth_it,
)
from ultraep_serve.costs.estimate import Estimate, custom_estimate, estimate_costs
from ultraep_serve.costs.fit import LineFit, fit, fit_bandwidth
from ultraep_serve.costs.hardware import HARDWARE, Efficiency, Hardware, hardware
from ultraep_serve.costs.memory import SlotMemory, slot_memory
from ultraep_serve.costs.model import CostModel, IntegerCosts
from ultraep_serve.costs.predict import Prefill, layer_seconds, prefill_seconds
from ultraep_serve.costs.shapes import PRESETS, WEIGHT_BITS, ModelShape, model_shape

__all__ = [
    "HARDWARE",
    "PRESETS",
    "WEIGHT_BITS",
    "CostModel",
    "Efficiency",
    "Estimate",
    "Hardware",
    "IntegerCosts",
    "LineFit",
    "ModelShape",
    "Prefill",
    "SlotMemory",
    "Transfer",
    "break_even_tokens",
    "custom_estimate",
    "estimate_costs",
    "fit",
    "fit_bandwidth",
    "hardware",
    "layer_seconds",
    "model_shape",
    "pick_relay",
    "prefill_seconds",
    "residual_imbalance",
    "saved_picoseconds",
    "slot_memory",
    "transfer_of",
    "worth_it",
]
