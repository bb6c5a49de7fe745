"""vLLM: ``plugin`` registers, ``load`` watches loading, ``stage`` balances."""
