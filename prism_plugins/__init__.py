"""Emulate Megatron-core and DeepSpeed jobs of any size with one extra launcher flag.

This module imports nothing: it is loaded in every process that imports torch.
"""

__version__ = "0.1.0"
