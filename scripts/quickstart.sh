#!/usr/bin/env bash
# Set everything up in .venv and emulate a 64-GPU Megatron-core job (7B dimensions, TP8 PP4 DP2) without a GPU.
# More arguments go to the launch, e.g. scripts/quickstart.sh --prism-cluster dgx-a100
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup_env.sh megatron
# As Megatron-LM asks for: its overlap of tensor-parallel calls needs one queue.
export CUDA_DEVICE_MAX_CONNECTIONS=1
exec "${PRISM_VENV:-.venv}/bin/torchrun" --nproc-per-node 1 scripts/train_gpt_megatron.py \
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 \
  --prism-emulate --prism-world-size 64 "$@"
