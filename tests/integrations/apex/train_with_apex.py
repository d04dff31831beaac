"""A training loop on Apex's fused kernels, as scripts use them: norms, causal softmax, Adam, clipping."""

import amp_C
import scaled_masked_softmax_cuda
import scaled_upper_triang_masked_softmax_cuda as causal
import torch
from apex.contrib.layer_norm.layer_norm import FastLayerNormFN
from apex.multi_tensor_apply import multi_tensor_applier
from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction
from apex.optimizers import FusedAdam

SEQUENCE, HEADS, HIDDEN = 512, 8, 512


class CausalSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, scale):
        probabilities = causal.forward(scores, torch.tensor(scale))
        ctx.save_for_backward(probabilities)
        return probabilities

    @staticmethod
    def backward(ctx, grad):
        (probabilities,) = ctx.saved_tensors
        return causal.backward(grad, probabilities, torch.tensor(1.0)), None


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        new = {"device": "cuda", "dtype": torch.bfloat16}
        self.weights = torch.nn.ParameterList([torch.ones(HIDDEN, **new) for _ in range(2)])
        self.biases = torch.nn.ParameterList([torch.zeros(HIDDEN, **new) for _ in range(2)])
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN, **new)

    def forward(self, x):
        x = FastLayerNormFN.apply(x, self.weights[0], self.biases[0], 1e-5)
        heads = self.linear(x).view(SEQUENCE, HEADS, HIDDEN // HEADS).transpose(0, 1)
        x = (CausalSoftmax.apply(heads @ heads.transpose(1, 2), 0.1) @ heads).transpose(0, 1).reshape_as(x)
        return FusedLayerNormAffineFunction.apply(x, self.weights[1], self.biases[1], (HIDDEN,), 1e-5)


model = Model()
optimizer = FusedAdam(model.parameters(), lr=1e-4)
overflow = torch.zeros(1, dtype=torch.int, device="cuda")
assert scaled_masked_softmax_cuda.get_batch_per_block(512, 512, 1, 8) == 4
for _ in range(6):
    optimizer.zero_grad()
    loss = model(torch.randn(SEQUENCE, HIDDEN, device="cuda", dtype=torch.bfloat16)).float().mean()
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, overflow, [grads], False)
    multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [grads, grads], 0.5)
    optimizer.step()
