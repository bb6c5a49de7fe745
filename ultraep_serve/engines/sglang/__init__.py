"""SGLang: ``plugin`` registers, ``hooks`` are the seams, ``group`` joins the layers."""
