"""The commands of the lab, one module each; ``ultraep_serve.cli`` names them."""
