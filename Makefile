# The targets anyone can type. ARGS= is passed through; APPLY=1 makes `make tune` apply.
SHELL := bash
.DEFAULT_GOAL := help

help: ## Show this list
	@grep -hE '^[a-z -]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

venv: ## Set up .venv from the lock
	@scripts/venv .venv requirements/run.txt

tune: venv ## Say what tuning this host would change and why; APPLY=1 does it
	@APPLY='$(APPLY)' scripts/tune $(ARGS)

demo: venv ## The same on a recorded 8-GPU machine, generated here
	@scripts/demo $(ARGS)

test: ## Everything below that this machine can run; says what it cannot
	@scripts/test lint unit integration compat molecule image lxc inference vm

lint: ## Style, types, documentation and syntax
	@scripts/test lint

test-unit: ## The logic as plain Python, and these scripts
	@scripts/test unit

test-integration: ## Whole playbooks, on recorded machines and on this one
	@scripts/test integration

test-compat: ## The playbooks with the lowest and the highest ansible-core
	@scripts/test compat

test-molecule: ## The role in a container with systemd
	@scripts/test molecule

test-image: ## The execution environment, built and run
	@scripts/test image

test-lxc: ## Real LXC containers
	@scripts/test lxc

test-inference: ## Benchmarks against real inference servers on CPU, SGLang itself among them
	@GPU_TUNING_SGLANG=1 scripts/test inference

test-vm: ## Kernel upgrade, way back and persistence in a real VM
	@scripts/test vm

bench: venv ## The tool's own speed, beside the alternatives
	@scripts/bench $(ARGS)

docs: ## Regenerate what is generated
	@scripts/venv .venv requirements/test.txt
	@.venv/bin/python scripts/role-readme

lock: ## Renew requirements/*.txt from requirements/*.in
	@scripts/lock

clean: ## Remove what the targets above made
	rm -rf .venv* .cache .ansible .molecule .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: help venv tune demo test lint test-unit test-integration test-compat test-molecule test-image test-lxc \
	test-vm test-inference bench docs lock clean
