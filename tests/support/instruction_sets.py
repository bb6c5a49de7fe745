"""Machines with other instruction sets than this one, as far as torch tells of them.

As a plug-in of pytest (``-p``) it has a whole run, its processes too, see the instruction set that
the variable ``PLAYED`` names.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["INSTRUCTION_SETS", "PLAYED", "InstructionSet", "own", "pretend"]

PLAYED = "ULTRAEP_TEST_INSTRUCTION_SET"


@dataclass(frozen=True)
class InstructionSet:
    """An x86-64 CPU's instructions beyond AVX2, each set with those before it."""

    avx512: bool
    bfloat16: bool  # AVX512-BF16
    amx: bool


INSTRUCTION_SETS = {
    "AVX2": InstructionSet(avx512=False, bfloat16=False, amx=False),
    "AVX512": InstructionSet(avx512=True, bfloat16=False, amx=False),
    "AVX512-BF16": InstructionSet(avx512=True, bfloat16=True, amx=False),
    "AMX": InstructionSet(avx512=True, bfloat16=True, amx=True),
}


def own() -> str:
    """The name of the largest set that this machine has."""
    capabilities = torch.cpu.get_capabilities()
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    if capabilities.get("avx512_bf16"):
        return "AVX512-BF16"
    return "AVX512" if capabilities.get("avx512_f") else "AVX2"


def pretend(set_attribute: Any, name: str) -> None:
    """Have torch say that this machine has the instruction set ``name``."""
    chosen = INSTRUCTION_SETS[name]
    capabilities = {
        "avx2": True,
        "avx512_f": chosen.avx512,
        "avx512_bf16": chosen.bfloat16,
        "amx_tile": chosen.amx,
    }
    set_attribute(torch.cpu, "_is_avx512_supported", lambda: chosen.avx512)
    set_attribute(torch.cpu, "_is_avx512_bf16_supported", lambda: chosen.bfloat16)
    set_attribute(torch.cpu, "_is_amx_tile_supported", lambda: chosen.amx)
    set_attribute(torch.cpu, "get_capabilities", lambda: capabilities)
    kind = "AVX512" if chosen.avx512 else "AVX2"
    set_attribute(torch.backends.cpu, "get_cpu_capability", lambda: kind)


if PLAYED in os.environ:
    pretend(setattr, os.environ[PLAYED])
