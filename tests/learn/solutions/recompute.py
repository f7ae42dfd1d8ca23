import torch
from torch import Tensor, nn


class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, parameter):
        ctx.block, ctx.state = block, torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        state = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            output = ctx.block(x)
        torch.set_rng_state(state)
        output.backward(gradient)
        return None, x.grad, None


def checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    return Checkpoint.apply(block, x, next(block.parameters()))
