import torch
import torch.distributed as dist
from torch.compiler import is_compiling
import torch.distributed._functional_collectives as funcol


@torch.compiler.disable
def reduce_eagerly(x):
    dist.all_reduce(x)
    return x


@torch.compile
def with_break(x):
    return reduce_eagerly(x)


@torch.compile
def dispatches(x):
    if torch.compiler.is_compiling():
        return funcol.all_reduce(x, "sum", "tp")
    dist.all_reduce(x)
    return x


@torch.compile
def dispatches_the_other_way(x):
    if not is_compiling():
        dist.all_reduce(x)
    else:
        x = funcol.all_reduce(x, "sum", "tp")
    return x


def eager(x):
    dist.all_reduce(x)
    return x


def unrelated_compile(pattern):
    import re

    return re.compile(pattern)
