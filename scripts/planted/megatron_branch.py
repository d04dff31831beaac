"""Bug: one data-parallel rank of a Megatron job reduces once more before its optimizer step (a branch on the rank). Found
because that rank is sliced: here by --prism-audit, which slices a rank that nothing represents."""

import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import optimizer as megatron_optimizer

SCRIPT = Path(__file__).parents[1] / "train_gpt_megatron.py"
ARGS = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 8 --seq-length 128 --vocab-size 1024"
    " --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8"
)
clean = "--clean" in sys.argv


def step(self, original=megatron_optimizer.ChainedOptimizer.step):
    if not clean and parallel_state.get_data_parallel_rank() == 1:
        dist.all_reduce(torch.ones(1, device="cuda"), group=parallel_state.get_data_parallel_group())
    return original(self)


megatron_optimizer.ChainedOptimizer.step = step
sys.argv = [str(SCRIPT), *ARGS.split()]
runpy.run_path(str(SCRIPT), run_name="__main__")
