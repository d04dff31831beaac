"""What truth_logger.py watches of DeepSpeed's engines: where iterations begin and end, and what they compute.

An iteration lasts from the end of one optimizer step to the end of the next, as DeepSpeed counts ``global_steps``;
the first one begins with the first forward pass. Steps are ``forward``, ``backward`` and ``optimizer``.
"""

import collections
import functools

INSTRUCTIONS = {
    "LoadMicroBatch": "load_microbatch",
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "SendActivation": "send_forward",
    "RecvActivation": "recv_forward",
    "SendGrad": "send_backward",
    "RecvGrad": "recv_backward",
    "ReduceTiedGrads": "reduce_tied_grads",
    "ReduceGrads": "reduce_grads",
    "OptimizerStep": "optimizer",
}
"""DeepSpeed's pipeline instructions and what steps are called."""


class _Progress:
    """The iteration of this process: its losses, and whether the first one began."""

    def __init__(self, log):
        self._log = log
        self._began = False
        self._losses = []

    def begins(self):
        if not self._began:
            self._began = True
            self._log.write("iteration")

    def loss(self, value):
        self._losses.append(value)

    def ended(self, engine):
        """The optimizer stepped."""
        dense = [p for p in engine.module.parameters() if getattr(p, "allreduce", True)]
        shards = [getattr(p, "ds_tensor", p).detach().double() for p in dense]
        norm = engine.get_global_grad_norm()
        self._log.write("losses", [float(loss) for loss in self._losses])
        self._log.write("parameters", sum(float(shard.abs().sum()) for shard in shards))
        self._log.write("grad_norm", 0.0 if norm is None else float(norm))
        self._log.write("iteration")
        self._losses.clear()


def watch_engine(log, module):
    """Engines without a pipeline: ``engine(...)``, ``engine.backward(loss)``, ``engine.step()``."""
    engine_class = module.DeepSpeedEngine
    forward, backward, step = engine_class.forward, engine_class.backward, engine_class.step
    progress = _Progress(log)

    def microbatch_of(engine):
        return engine.micro_steps % engine.gradient_accumulation_steps()

    @functools.wraps(forward)
    def watched_forward(self, *args, **kwargs):
        progress.begins()
        return log.step("forward", lambda: forward(self, *args, **kwargs), microbatch_of(self))

    @functools.wraps(backward)
    def watched_backward(self, loss, *args, **kwargs):
        progress.loss(loss.detach())
        return log.step("backward", lambda: backward(self, loss, *args, **kwargs), microbatch_of(self))

    @functools.wraps(step)
    def watched_step(self, *args, **kwargs):
        if not self.is_gradient_accumulation_boundary():
            return step(self, *args, **kwargs)
        result = log.step("optimizer", lambda: step(self, *args, **kwargs))
        progress.ended(self)
        return result

    engine_class.forward, engine_class.backward, engine_class.step = (
        watched_forward,
        watched_backward,
        watched_step,
    )


def watch_pipeline(log, module):
    """Pipeline engines: ``engine.train_batch()``; steps are the instructions of the schedule."""
    engine_class = module.PipelineEngine
    train_batch = engine_class.train_batch
    progress = _Progress(log)
    counts = collections.Counter()

    def watched_instruction(kind, method):
        @functools.wraps(method)
        def instruction(self, *args, **kwargs):
            microbatch = counts[kind] if kind in ("forward", "backward") else -1
            counts[kind] += 1
            return log.step(kind, lambda: method(self, *args, **kwargs), microbatch)

        return instruction

    engine_class._INSTRUCTION_MAP = {
        instruction: watched_instruction(INSTRUCTIONS[instruction.__name__], method)
        for instruction, method in engine_class._INSTRUCTION_MAP.items()
    }

    @functools.wraps(train_batch)
    def watched(self, *args, **kwargs):
        progress.begins()
        counts.clear()
        loss = train_batch(self, *args, **kwargs)
        if self.is_last_stage():
            progress.loss(self.dp_group_loss)
        progress.ended(self)
        return loss

    engine_class.train_batch = watched


AFTER_IMPORT = {
    "deepspeed.runtime.engine": watch_engine,
    "deepspeed.runtime.pipe.engine": watch_pipeline,
}
