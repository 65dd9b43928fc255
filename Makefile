# Each target prepares its environment itself: an active one, or .venv (see tools/prepare_environment.sh).
.PHONY: help quickstart test test-all test-current golden fuzz lint docs clean

environment = python="$$(bash tools/prepare_environment.sh --dev)"

help:
	@echo "make quickstart   train, stop, resume, convert and try a tiny NeoBERT on this machine"
	@echo "make test         ruff, mypy and the tests that guard every promise once: about ten minutes on two idle cores"
	@echo "make test-all     the same with everything: every layout, storms of kills, fuzzing, the walk through the README"
	@echo "make test-current the engine on Python 3.12 with the newest Megatron-Core, in .venv-current; checkpoints of both lines"
	@echo "make golden       write the golden curves anew: tests/distributed/golden_curves.json; CHANGELOG.md says why"
	@echo "make fuzz         mutated corpora, settings, tokenizers, checkpoints and model folders; FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) times as many as in the suite"
	@echo "make lint         ruff and mypy alone"
	@echo "make docs         the documentation as a site in build/site, every link and anchor checked"
	@echo "make clean        remove build products and caches, keep .venv and quickstart_run"

# How many times as many mutations are tried as in the suite, others each time.
FUZZ_EXAMPLES ?= 25

quickstart:
	@bash examples/quickstart.sh

# The linters' verdict waits until the tests have spoken, so that one run shows everything.
test: selection = -m "not slow"
test test-all:
	@$(environment) && lint=0 && { $(MAKE) --no-print-directory lint || lint=$$?; } && "$$python" -m pytest -n auto --dist worksteal --durations=10 $(selection) && exit $$lint

# Python 3.12 of the PATH, or one that pyenv has; an active environment takes no part.
python_current = { python3.12 -c "import sys; print(sys.executable)" || ls "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12*/bin/python | tail -n 1; } 2>/dev/null
engine = tests/distributed tests/gpu tests/gpu_path tests/parity tests/reliability $(addprefix tests/repo/test_, recipes.py settings_page.py) \
	$(addprefix tests/unit/, checkpoint conversion model planning runtime training)

test-current:
	@base="$$($(python_current))" && [ -n "$$base" ] || { echo "make test-current needs Python 3.12, and there is none: nothing was run" >&2; exit 69; }; \
	$(environment) && other="$$python" || exit; \
	[ -x .venv-current/bin/python ] || "$$base" -m venv .venv-current || exit; \
	python="$$(VIRTUAL_ENV="$$PWD/.venv-current" bash tools/prepare_environment.sh --dev)" || exit; \
	OTHER_PYTHON="$$other" "$$python" -m pytest -n auto --dist worksteal -m "not slow" $(engine)

golden:
	@$(environment) && WRITE_GOLDEN=1 "$$python" -m pytest tests/distributed/test_golden_curves.py -k has_its_golden_curve

fuzz:
	@$(environment) && FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) "$$python" -m pytest tests/security/test_fuzz.py

lint:
	@$(environment) && "$$python" -m ruff check . && "$$python" -m ruff format --check . && "$$python" -m mypy

# An environment that has the two packages, or .venv-docs with nothing else: Markdown needs no torch.
docs:
	@for python in "$${VIRTUAL_ENV:-.venv}/bin/python" .venv-docs/bin/python; do \
		"$$python" -c "import mkdocs, material" 2>/dev/null && break; done || { \
		python3 -m venv .venv-docs && "$$python" -m pip install --quiet -c constraints.txt mkdocs mkdocs-material; } || exit 69; \
	NO_MKDOCS_2_WARNING=1 "$$python" -m mkdocs build --strict && echo build/site/index.html

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv*/*' -prune -exec rm -rf {} +
