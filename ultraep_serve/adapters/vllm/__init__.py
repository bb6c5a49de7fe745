"""vLLM: ``plugin`` registers, ``routed_experts`` is the seam, ``group`` joins the layers."""
