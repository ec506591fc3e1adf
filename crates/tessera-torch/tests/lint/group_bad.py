import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

GROUP = dist.new_group([0, 1])


@torch.compile
def annotated(x, group: dist.ProcessGroup):  # expect: T1432
    return funcol.all_reduce(x, "sum", group)


@torch.compile(fullgraph=True)
def passed(x, pg):
    return funcol.all_reduce(x, "sum", group=pg)  # expect: T1432


@torch.compile
def captured(x):
    return funcol.all_reduce(x, "sum", GROUP)  # expect: T1432


@torch.compile
def made(x):
    group = dist.new_group([0, 1])  # expect: T1432
    return x


class Layer(torch.nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.group = mesh.get_group("tp")

    def forward(self, x):
        return funcol.all_reduce(x, "sum", self.group)  # expect: T1432


layer = torch.compile(Layer(None))
