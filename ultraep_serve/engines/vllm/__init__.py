"""vLLM: ``plugin`` registers, ``routed_experts`` has the seams, ``group`` joins the layers."""
