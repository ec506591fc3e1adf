"""A column- and row-parallel MLP whose sum runs in one of three ways."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn


class MlpInPlace(nn.Module):
    """Mode A: in place, with a work object."""

    def __init__(self, width, group):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.group = group

    def forward(self, x):
        y = self.down(torch.relu(self.up(x)))
        work = dist.all_reduce(y, group=self.group, async_op=True)  # expect: T1431
        work.wait()
        return y


@torch.compiler.disable
def sum_eagerly(y, group):
    dist.all_reduce(y, group=group)
    return y


class MlpDisabled(nn.Module):
    """Mode B: a break that is meant."""

    def __init__(self, width, group):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.group = group

    def forward(self, x):
        return sum_eagerly(self.down(torch.relu(self.up(x))), self.group)


class MlpFunctional(nn.Module):
    """Mode C: functional, in one graph."""

    def __init__(self, width, group_name: str):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.group_name = group_name

    def forward(self, x):
        y = self.down(torch.relu(self.up(x)))
        return funcol.all_reduce(y, "sum", self.group_name)


def main():
    dist.init_process_group("gloo")
    name = dist.group.WORLD.group_name
    for model in (MlpInPlace(64, None), MlpDisabled(64, None), MlpFunctional(64, name)):
        print(torch.compile(model)(torch.randn(2, 64)).sum().item())
    in_place, disabled, functional = MlpInPlace(8, None), MlpDisabled(8, None), MlpFunctional(8, name)
    for model in (torch.compile(in_place), torch.compile(disabled), torch.compile(functional)):
        print(model(torch.randn(2, 8)).sum().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
