import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce

funcol = torch.distributed._functional_collectives


@torch.compiler.disable
def disabled(x):
    return all_reduce(x, "sum", "tp")  # expect: T1434


@torch.compile
def compiled(x):
    return all_reduce(x, "sum", "tp")


def evaluate(x):
    y = funcol.all_gather_tensor(x, 0, "tp")  # expect: T1434
    return y


def swapped(x):
    if torch.compiler.is_compiling():
        dist.all_reduce(x)  # expect: T1433
        return x
    return all_reduce(x, "sum", "tp")  # expect: T1434
