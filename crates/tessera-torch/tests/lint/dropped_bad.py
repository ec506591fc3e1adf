import torch.distributed as dist
import torch.distributed._functional_collectives as funcol


def dropped(x):
    funcol.all_reduce(x, "sum", "tp")  # expect: T1440
    return x


def unused(x):
    y = funcol.all_reduce(x, "sum", "tp")  # expect: T1440
    return x


def dropped_work(x):
    dist.all_reduce(x, async_op=True)  # expect: T1440


def dropped_wait(x):
    y = funcol.all_reduce(x, "sum", "tp")
    funcol.wait_tensor(y)  # expect: T1440
    return y
