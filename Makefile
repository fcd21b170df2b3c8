# make train | test | bench | kl_sweep | tensorboard: each first sets up .venv (once).
# make pins: renews the versions in both requirements files.
PYTHON ?= python3
GPU := $(shell nvidia-smi -L > /dev/null 2>&1 && echo yes)
REQUIREMENTS := $(if $(GPU),requirements.txt,requirements-cpu.txt)
TORCH := $(shell grep -o '^torch==[0-9.]*' requirements-cpu.txt)
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install -q --disable-pip-version-check --no-compile
UV := $(or $(shell command -v uv 2> /dev/null),$(VENV)/bin/uv)
ARGS ?=

train: $(VENV)/ready
	$(RUN) starter.py $(ARGS)

test: $(VENV)/ready
	$(RUN) -m pytest -q -n 2 --dist loadgroup test_starter.py tests $(ARGS)

bench: $(VENV)/ready
	$(RUN) bench.py $(ARGS)

kl_sweep: $(VENV)/ready
	$(RUN) kl_sweep.py $(or $(ARGS),--toys)

tensorboard: $(VENV)/ready
	$(RUN) -m tensorboard.main --logdir $(or $(LOGDIR),out/tb) $(ARGS)

$(VENV)/ready: $(REQUIREMENTS)
	@echo "setting up $(VENV) from $(REQUIREMENTS) (a minute or two, once)"
	$(PYTHON) -m venv $(VENV)
	@cp $(REQUIREMENTS) $(VENV)/pins.txt
# PyTorch's CPU build needs none of the gigabytes of CUDA libraries.
ifeq ($(GPU),)
	@$(PIP) --no-deps --retries 0 --timeout 10 \
		--index-url https://download.pytorch.org/whl/cpu $(TORCH) > /dev/null 2>&1 \
		&& sed -i -E '/^(cuda|nvidia)-/d' $(VENV)/pins.txt \
		|| echo "PyTorch's CPU build cannot be downloaded: taking the ordinary one, which is larger"
endif
	@(test -x $(UV) || $(PIP) uv > /dev/null 2>&1) \
		&& $(UV) pip install -q --python $(RUN) --no-deps -r $(VENV)/pins.txt \
		|| (echo "uv failed: installing with pip, which takes longer" \
		&& $(PIP) --no-deps -r $(VENV)/pins.txt)
	@$(RUN) -m compileall -q -j 0 $(VENV)/lib > /dev/null 2>&1 || true
	@$(RUN) -c "import vllm" \
		|| echo "!!! vLLM cannot be used here: starter.py will sample with plain torch"
	@touch $@

$(VENV)/bin/uv:
	$(PYTHON) -m venv $(VENV)
	$(PIP) uv

PINS := pip compile -q --upgrade --python-platform linux --python-version 3.11 --no-annotate \
	--custom-compile-command "make pins" pyproject.toml

pins: $(UV)
	$(UV) $(PINS) --extra gpu --output-file requirements.txt
	$(UV) $(PINS) --extra cpu --output-file requirements-cpu.txt --config-file requirements-cpu.toml

clean:
	rm -rf $(VENV)

.PHONY: train test bench kl_sweep tensorboard pins clean
