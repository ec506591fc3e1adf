import torch
import torch.distributed as dist


def read_before(x):
    work = dist.all_reduce(x, async_op=True)
    y = x * 2  # expect: T1439
    work.wait()
    return y


def output_before(x, out):
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    z = x + 1
    return out + z  # expect: T1439


def raw(x):
    y = torch.ops._c10d_functional.all_reduce(x, "sum", "0")
    return y * 2  # expect: T1439


def input_of_the_wait(x):
    y = torch.ops._c10d_functional.all_reduce(x, "sum", "0")
    z = torch.ops._c10d_functional.wait_tensor(y)
    return y + z  # expect: T1439


def in_one_arm(x, flag):
    work = dist.all_reduce(x, async_op=True)
    if flag:
        print(x.sum())  # expect: T1439
    work.wait()


def under_another_name(x):
    work = dist.all_reduce(x, async_op=True)
    z = x
    y = z * 2  # expect: T1439
    work.wait()
    return y
