import torch
import torch.distributed as dist


class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer) -> None:
        self.parameters, ranks = list(parameters), dist.get_world_size()
        sizes = [parameter.numel() for parameter in self.parameters]
        self.sizes, self.share = sizes, -(-sum(sizes) // ranks)
        self.shard = self.part([parameter.detach() for parameter in self.parameters]).clone()
        self.optimizer = make_optimizer([self.shard])

    def part(self, tensors):
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        missing = self.share * dist.get_world_size() - flat.numel()
        return torch.cat([flat, flat.new_zeros(missing)]).split(self.share)[dist.get_rank()]

    @torch.no_grad()
    def step(self) -> None:
        self.shard.grad = self.part([parameter.grad for parameter in self.parameters])
        self.optimizer.step()
        shards = [torch.empty_like(self.shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, self.shard)
        flat = torch.cat(shards)[: sum(self.sizes)]
        for parameter, values in zip(self.parameters, flat.split(self.sizes), strict=True):
            parameter.copy_(values.view_as(parameter))
