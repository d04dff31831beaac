#!/usr/bin/env bash
# Make the virtual environment .venv with a CPU build of torch, megatron-core and this package (editable).
# Usage: scripts/setup_env.sh [extra ...]     e.g. scripts/setup_env.sh megatron dev
# PYTHON (default python3) names the interpreter, PRISM_VENV another place for the environment,
# PRISM_TORCH another torch requirement (a CPU build, 2.11 or newer).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
venv=${PRISM_VENV:-.venv}
torch=${PRISM_TORCH:-torch==2.13.0}
extras=$(IFS=,; echo "${*:-megatron}")

"$python" - <<'EOF' || exit 2
import sys
if sys.version_info < (3, 11):
    sys.exit(f"setup: Python 3.11 or newer is needed, this is {sys.version.split()[0]}: set PYTHON=python3.11")
EOF
command -v g++ >/dev/null || {
  echo "setup: g++ is needed to compile the virtual CUDA backend (Debian/Ubuntu: apt-get install g++; RHEL: dnf install gcc-c++; conda: conda install gxx_linux-64)" >&2
  exit 2
}

stamp="$venv/.prism-$(cat pyproject.toml "${BASH_SOURCE[0]}" | cksum | cut -d' ' -f1)-${extras//,/-}"
[ -e "$stamp" ] && exit 0
echo "setup: creating $venv ($torch, extras: $extras); a few minutes, mostly downloads"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@" 2> >(grep -v '^WARNING' >&2); }
# PyTorch's own index holds the small CPU builds; where it cannot be reached pip goes on with its usual index.
pip "$torch" --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu
# torch warns about NumPy, which comes below.
"$venv/bin/python" -W ignore - <<'EOF'
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
if torch.version.cuda:
    raise SystemExit(
        f"setup: pip took a CUDA build of torch ({torch.__version__}); the virtual CUDA backend needs a CPU build for now: "
        "install one (pytorch.org, 'Compute Platform: CPU') and run this again"
    )
EOF
pip "setuptools>=77" wheel
pip --no-build-isolation -e ".[$extras]"
touch "$stamp"
