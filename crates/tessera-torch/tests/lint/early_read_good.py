import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce, wait_tensor


def waits_first(x):
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x * 2


def reads_input(x, out):
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    y = x * 2
    work.wait()
    return out + y


def reads_shape(x):
    work = dist.all_reduce(x, async_op=True)
    y = torch.empty(x.shape, dtype=x.dtype)
    work.wait()
    return x + y


def functional(x):
    y = all_reduce(x, "sum", "tp")
    return y * 2


def explicit(x):
    y = all_reduce(x, "sum", "tp")
    y = wait_tensor(y)
    return y


def nested(x):
    y = torch.ops._c10d_functional.all_reduce(x, "sum", "0")
    return torch.ops._c10d_functional.wait_tensor(y) * 2


def waits_in_one_arm(x, overlap):
    work = dist.all_reduce(x, async_op=True)
    if not overlap:
        work.wait()
    else:
        finish(work)
    return x


def replaced(x):
    work = dist.all_reduce(x, async_op=True)
    x = torch.zeros(3)
    y = x * 2
    work.wait()
    return y


def in_a_block(x, stream):
    with torch.cuda.stream(stream):
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x


def stored(x, slots):
    work = dist.all_reduce(x, async_op=True)
    slots[0] = x
    y = x
    work.wait()
    return y
