import torch
import torch.distributed as dist
from torch import Tensor, nn


def run_step(stage: nn.Module, inputs: list[Tensor], targets: list[Tensor], loss) -> Tensor | None:
    rank, ranks, count = dist.get_rank(), dist.get_world_size(), len(inputs)
    first, last = rank == 0, rank == ranks - 1
    saved, sends, losses = [], [], []

    def forward(index: int) -> None:
        x = inputs[index]
        if not first:
            x = torch.empty_like(inputs[0])
            dist.recv(x, rank - 1)
            x.requires_grad_()
        output = stage(x)
        if last:
            output = loss(output, targets[index]) / count
            losses.append(output.detach())
        else:
            sends.append(dist.isend(output.detach(), rank + 1))
        saved.append((x, output))

    def backward() -> None:
        x, output = saved.pop(0)
        gradient = None
        if not last:
            gradient = torch.empty_like(output)
            dist.recv(gradient, rank + 1)
        output.backward(gradient)
        if not first:
            sends.append(dist.isend(x.grad, rank - 1))

    warm_up = min(count, ranks - 1 - rank)
    for index in range(warm_up):
        forward(index)
    for index in range(warm_up, count):
        forward(index)
        backward()
    while saved:
        backward()
    for send in sends:
        send.wait()
    return torch.stack(losses).sum() if last else None
