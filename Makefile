# The front door: `make demo`, `make test`. Everything lives in .venv at the repository root.
PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.installed

.PHONY: demo test test-slow lint bench fuzz chaos clean
.DEFAULT_GOAL := demo

$(STAMP): pyproject.toml constraints.txt
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@echo "installing into .venv (about 6 GB, a few minutes the first time)"
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[ray,dev]'
	@$(PY) -m compileall -qq -j 0 .venv/lib || true  # on all cores, pip takes one; some files are of other Pythons
	@touch $@

demo: $(STAMP)
	@.venv/bin/uno demo

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Lint, types, the default lane, the steps on a GPU that computes nothing, and the Ray lane with one case per fault family.
test: lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --durations=5
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -m fakecuda --durations=5 tests/uno/test_fake_cuda*.py
	$(PY) -m pytest -m 'ray and not slow' --durations=10

# The full matrices.
test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -m 'slow and not ray' --durations=5
	$(PY) -m pytest -m 'slow and ray' --durations=10

bench: $(STAMP)
	$(PY) -m benchmarks

# 10,000 mutated images of each of eight formats, 2,000 of each other kind of file.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m tests.fuzz

# 30 signals at random moments of every command, hours.
chaos: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m tests.chaos

clean:
	rm -rf .venv runs build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
