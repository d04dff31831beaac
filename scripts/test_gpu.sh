#!/usr/bin/env bash
# Runs the tests that need a real GPU (CUDA build of torch, megatron-core for the jobs; a few minutes on one H200).
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python - <<'PY'
import torch
if torch.version.cuda is None or not torch.cuda.is_available():
    raise SystemExit("torch sees no GPU: these tests would all be skipped")
print(torch.__version__, torch.cuda.get_device_name())
PY
exec python -m pytest -q -m gpu tests/gpu "$@"
