# make demo    complete held-out code with plain vLLM and with EESD, side by side
# make test    the whole test suite            (make test ARGS="-k policy")
# make venv    only make .venv                 (make venv DEVICE=cpu PYTHON=python3.12)
# make lint    ruff
# make dist    sdist and wheel in dist/, checked by twine
# make clean   remove what building and testing leave behind; make distclean removes .venv too

PYTHON ?= python3
# cpu, gpu, or auto: gpu where an NVIDIA driver answers.
DEVICE ?= auto
ARGS ?=

VENV := .venv
STAMP := $(VENV)/.installed

# The repository root must stay off sys.path: kernels/ would hide Hugging Face's `kernels` package there.
export PYTHONSAFEPATH := 1
export VLLM_CPU_KVCACHE_SPACE ?= 1
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1

.PHONY: demo test venv lint dist clean distclean

demo: $(STAMP)
	$(VENV)/bin/eesd demo $(ARGS)

test: $(STAMP)
	$(VENV)/bin/python -m pytest $(ARGS)

venv: $(STAMP)

$(STAMP): setup.py pyproject.toml .ci/make-venv
	.ci/make-venv "$(PYTHON)" "$(DEVICE)" $(VENV)
	@touch $@

lint: $(STAMP)
	$(VENV)/bin/python -m pip install --quiet ruff
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
