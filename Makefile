# Each target first sets up .venv (tools/setup.py: CPU or NVIDIA, tested versions) or re-uses it.
# PYTHON=python3.12 picks the interpreter, EXTRA=cpu or gpu the engine, ARGS goes to pytest, to the
# parity table and to the benches; GPUS is how many bench-scale uses.
PYTHON ?= python3
EXTRA ?=
ARGS ?=
GPUS ?= 1

.PHONY: demo test check bench bench-gpu bench-scale parity parity-gpu soak setup

demo: setup
	.venv/bin/core-rerank demo

test: setup
	.venv/bin/pytest -n auto --dist loadfile $(ARGS)

check: setup
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright
	.venv/bin/lint-imports

bench: setup
	.venv/bin/python -m core_rerank.eval.bench

parity: setup
	.venv/bin/python tools/parity_table --device cpu $(ARGS)

parity-gpu: setup
	.venv/bin/python tools/parity_table --device gpu $(ARGS)

soak: setup
	.venv/bin/python -m core_rerank.eval.soak $(ARGS)

bench-gpu: setup
	.venv/bin/python -m core_rerank.eval.bench_gpu $(ARGS)

bench-scale: setup
	.venv/bin/python -m core_rerank.eval.bench_scale --gpus $(GPUS) $(ARGS)
	.venv/bin/python tools/parity_table --device gpu --only 'tensor parallel'

setup:
	@$(PYTHON) tools/setup.py $(if $(EXTRA),--extra $(EXTRA))
