"""Importable; images cannot be transformed."""
