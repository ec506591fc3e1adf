"""A function that is defined again before it is compiled, and one that is only assigned."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol


def build(case):
    dist.init_process_group("nccl")

    def step(x):
        return x

    if case == "sum":

        def step(x):
            return funcol.all_reduce(x, "sum", "0")

    return torch.compile(step)


def print_twice(x):
    y = funcol.all_reduce(x, "sum", "0")  # expect: T1434
    return y
