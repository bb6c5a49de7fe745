"""Machines with other instruction sets than this one, as far as torch tells of them."""

from typing import Any, NamedTuple

import torch


class InstructionSet(NamedTuple):
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


def pretend(set_attribute: Any, name: str) -> None:
    """Have torch say that this machine has the instruction set ``name``."""
    avx512, bfloat16, amx = INSTRUCTION_SETS[name]
    capabilities = {"avx2": True, "avx512_f": avx512, "avx512_bf16": bfloat16, "amx_tile": amx}
    set_attribute(torch.cpu, "_is_avx512_supported", lambda: avx512)
    set_attribute(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16)
    set_attribute(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    set_attribute(torch.cpu, "get_capabilities", lambda: capabilities)
    kind = "AVX512" if avx512 else "AVX2"
    set_attribute(torch.backends.cpu, "get_cpu_capability", lambda: kind)
