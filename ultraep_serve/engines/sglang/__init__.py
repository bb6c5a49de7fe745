"""SGLang: ``plugin`` registers, ``hooks`` watch loading and batches, ``stage`` balances."""
