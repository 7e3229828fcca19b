"""A strategy as another package would bring it: one file, one class, found through its entry point.

Whole models on all ranks; gradients are summed after the last backward, in one all-reduce a parameter.
"""

from mgpu.parallel.base import Strategy, StrategyOptions, Trainable, agree, backward_one, scale_gradients


class AcmeOptions(StrategyOptions):
    """It has an option, too."""

    colour: str = "blue"


class Acme(Strategy):
    Options = AcmeOptions

    def replicas(self, world):
        return world

    def build(self, model, task, context):
        return Trainable(model=model, module=model, task=task, context=context)

    def forward_backward(self, trainable, window):
        import torch
        import torch.distributed as dist

        sums = torch.zeros(2, dtype=torch.float64)
        for micro_batch in window.micro_batches:
            sums += backward_one(trainable, micro_batch)
        totals = agree(trainable.context, sums)
        for parameter in trainable.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        scale_gradients(trainable.parameters, 1.0 / (totals.units * trainable.context.loss_scale))
        return totals
