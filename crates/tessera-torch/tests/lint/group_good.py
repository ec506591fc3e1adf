import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

GROUP = dist.new_group([0, 1])
NAME = GROUP.group_name


@torch.compile
def named(x):
    return funcol.all_reduce(x, "sum", NAME)


@torch.compile
def by_parameter(x, group: str):
    return funcol.all_reduce(x, "sum", group)


def eager(x, group: dist.ProcessGroup):
    dist.all_reduce(x, group=group)
    return x
