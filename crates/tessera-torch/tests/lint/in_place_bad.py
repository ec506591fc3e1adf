import functools

import torch
import torch.distributed
import torch.distributed as dist
from torch import nn
from torch.distributed import all_gather_into_tensor, all_reduce as ar


@torch.compile
def decorated(x):
    dist.all_reduce(x)  # expect: T1433
    return x


@functools.partial(torch.compile, fullgraph=True)
def partially(x):
    torch.distributed.broadcast(x, src=0)  # expect: T1433
    return x


def passed(x, out):
    all_gather_into_tensor(out, x)  # expect: T1433
    return reduce(out)


def reduce(x):
    ar(x)  # expect: T1433
    return x


class Mlp(nn.Module):
    def forward(self, x):
        return self.sum_up(x)

    def sum_up(self, x):
        torch.distributed.all_reduce(x)  # expect: T1433
        return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Mlp() for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


fast = torch.compile(passed)
model = Block().cuda()
model.compile()
