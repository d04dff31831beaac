"""Sizes of a Megatron model by formula: FLOPs, traffic, parameters and activations that no run can do without.

Everything here is a lower bound: norms, biases, routers and what only some implementations keep are left out. See
docs/tuning.md for how bounds are made of it.
"""

from __future__ import annotations

from prism_plugins.integration.tuning import Arguments

CACHED_BYTES = 2**28
"""Smaller tensors may never come to a GPU's memory (its L2 has 50 MB on an H100)."""


class ModelSizes:
    """Sizes of the model that a launch's arguments describe."""

    def __init__(self, args: Arguments) -> None:
        self.layers = int(args["num_layers"])
        self.hidden = int(args["hidden_size"])
        self.heads = int(args["num_attention_heads"])
        self.groups = int(args.get("num_query_groups") or 0) if args.get("group_query_attention") else 0
        self.groups = self.groups or self.heads
        channels = int(args.get("kv_channels") or self.hidden // self.heads)
        self.attention = self.heads * channels
        self.kv = self.groups * channels
        self.ffn = int(args.get("ffn_hidden_size") or 4 * self.hidden)
        self.gated = bool(args.get("swiglu"))
        self.experts = int(args.get("num_experts") or 0)
        self.top_k = int(args.get("moe_router_topk") or 1) if self.experts else 1
        if self.experts:
            self.ffn = int(args.get("moe_ffn_hidden_size") or self.ffn)
        self.seq = int(args["seq_length"])
        self.vocab = int(args.get("padded_vocab_size") or args.get("vocab_size") or 0)
        half = args.get("bf16") or args.get("fp16") or "bf16" not in args
        self.dtype = "float32" if not half else "float16" if args.get("fp16") else "bfloat16"
        self.param_bytes = 2 if half else 4
        self.grad_bytes = 4 if args.get("accumulate_allreduce_grads_in_fp32") else self.param_bytes
        self.optimizer_bytes = 12 if half else 8
        if args.get("optimizer", "adam") != "adam":
            self.optimizer_bytes = 4 if half else 0
        if args.get("use_precision_aware_optimizer") or args.get("optimizer_cpu_offload"):
            self.optimizer_bytes = 0  # Its states may be as small as one likes, or elsewhere.
        self._latent = bool(args.get("multi_latent_attention"))
        self._every = args.get("moe_layer_freq", 1) in (None, 1)
        self._masked_apart = args.get("masked_softmax_fusion") is False
        self._unfused = args.get("transformer_impl") == "local" and not self._latent

    def layer_flops(self, micro_batch: int, *, recomputed: bool) -> float:
        """Matrix products of a layer, forward and backward, of one micro-batch: 2 FLOPs a multiply-add, backward twice
        the forward. Fused attention as if causal masks saved half; Megatron's own computes all of it."""
        tokens = self.seq * micro_batch
        projections = 0 if self._latent else self.hidden * (2 * self.attention + 2 * self.kv)
        scores = 0 if self._latent else self.seq * self.attention * (2 if self._unfused else 1)
        mlp = (3 if self.gated else 2) * self.hidden * self.ffn * (self.top_k if self._every else 0)
        forward = 2.0 * tokens * (projections + scores + mlp)
        return forward * (4 if recomputed else 3)

    def layer_traffic(self, micro_batch: int, *, sp: bool, recomputed: bool) -> float:
        """Bytes that the tensor-parallel collectives of a layer bring to a rank where nothing hides them, over (tp - 1) / tp.

        Attention and MLP each: with sequence parallelism a gather and a reduce-scatter of the activations in forward and the
        gather of the output's gradient in backward (``RowParallelLinear``), without it an all-reduce in forward (of which a
        switch that reduces moves half of what a ring does). The other collectives of backward go on beside the gradients of
        weights. Experts have collectives of their own, which are not counted.
        """
        parts = (0 if self._latent else 1) + (0 if self.experts else 1)
        forward = parts * (2 if sp else 1)
        times = forward * (2 if recomputed else 1) + (parts if sp else 0)
        return times * self.seq * micro_batch * self.hidden * self.param_bytes

    def softmax_bytes(self, micro_batch: int, tp: int, cp: int, *, kind: str) -> float:
        """What the softmax of unfused attention reads and writes in a layer: scores in, probabilities out, in forward (once
        more where they are recomputed); two in, one out in backward. Where torch's own ops mask them, the mask is one pass
        more in each (``masked_fill``)."""
        scores = micro_batch * self.heads / tp * self.seq * self.seq / cp * self.param_bytes
        if not self._unfused or scores < CACHED_BYTES:
            return 0.0
        masked = 2 if self._masked_apart else 0
        return scores * ((2 + masked) * (1 if kind == "none" else 2) + 3 + masked)

    def optimizer_traffic(self, params: float, shards: int) -> float:
        """What Adam's step moves for that many parameters of a rank: states read and written, gradients read, parameters
        written."""
        if self.optimizer_bytes < 8:
            return 0.0
        moved = params / shards * (2 * self.optimizer_bytes + self.grad_bytes + self.param_bytes)
        return moved if moved > 4 * CACHED_BYTES else 0.0

    def loss_flops(self, micro_batch: int) -> float:
        """Logits, forward and backward."""
        return 6.0 * self.seq * micro_batch * self.hidden * self.vocab

    def layer_params(self, tp: int, ep: int, etp: int) -> float:
        """Parameters of a layer on a rank, norms, biases and routers left out."""
        attention = 0 if self._latent else self.hidden * (2 * self.attention + 2 * self.kv)
        return attention / tp + self.expert_params(ep, etp) + (0 if self.experts else self._mlp() / tp)

    def expert_params(self, ep: int, etp: int) -> float:
        """Those of its experts; nothing where only some layers have experts."""
        return self._mlp() * self.experts / (ep * etp) if self._every else 0.0

    def _mlp(self) -> float:
        return (3 if self.gated else 2) * self.hidden * self.ffn

    def embedding_params(self, tp: int) -> float:
        """Of the embedding, and of the output layer."""
        return self.hidden * self.vocab / tp

    def kept_bytes(self, micro_batch: int, tp: int, cp: int, sp: bool, *, kind: str) -> float:
        """Activations of a layer that its backward needs: the inputs of its matrix products, of the activation function and
        of the attention, the probabilities of unfused attention; of a recomputed layer its input."""
        tokens, size = self.seq * micro_batch / cp, self.param_bytes
        spread = tp if sp else 1
        if kind == "full":
            return tokens * self.hidden / spread * size
        wide = (3 if self.gated else 2) * self.ffn * (0 if self.experts else 1)
        inner = (wide + (0 if self._latent else 2 * self.attention + 2 * self.kv)) / tp
        probabilities = self.heads * self.seq / tp if self._unfused and kind == "none" else 0
        return tokens * (inner + probabilities + 2 * self.hidden / spread) * size
