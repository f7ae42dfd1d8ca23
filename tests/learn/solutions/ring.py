import torch
import torch.distributed as dist
from torch import Tensor


def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shard = torch.stack([k, v])
    output, log_sum = None, None
    for step in range(ranks):
        source = (rank - step) % ranks
        if step < ranks - 1:
            incoming = torch.empty_like(shard)
            send = dist.isend(shard, (rank + 1) % ranks)
            receive = dist.irecv(incoming, (rank - 1) % ranks)
        if source <= rank:
            scores = q @ shard[0].transpose(-1, -2) / q.shape[-1] ** 0.5
            if source == rank:
                above = torch.ones(scores.shape[-2:]).triu(1).bool()
                scores = scores.masked_fill(above, -torch.inf)
            part_sum = scores.logsumexp(-1, keepdim=True)
            part = (scores - part_sum).exp() @ shard[1]
            if output is None:
                output, log_sum = part, part_sum
            else:
                total = torch.logaddexp(log_sum, part_sum)
                output = (log_sum - total).exp() * output + (part_sum - total).exp() * part
                log_sum = total
        if step < ranks - 1:
            send.wait()
            receive.wait()
            shard = incoming
    return output
