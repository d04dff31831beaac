#!/usr/bin/env bash
# Set everything up in .venv and run the checks and tests. More arguments go to pytest, e.g. scripts/test.sh -k layout
# Tests of more than a minute that resemble others are left out: scripts/test.sh -m slow runs them.
# MEGATRON_LM=PATH adds the tests that launch the unmodified pretrain_gpt.py of a Megatron-LM checkout (core_r0.16.0).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup_env.sh megatron deepspeed huggingface dev report
export PATH="$(realpath "${PRISM_VENV:-.venv}")/bin:$PATH"
ruff check .
ruff format --check .
lint-imports
exec python -m pytest -n 2 --dist loadgroup -m "not slow" "$@"
