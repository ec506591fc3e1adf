import torch.distributed as dist
import torch.distributed._functional_collectives as funcol


def used(x):
    x = funcol.all_reduce(x, "sum", "tp")
    return x


def used_later(x):
    y = funcol.all_reduce(x, "sum", "tp")

    def finish():
        return y + 1

    return finish


def in_place(x):
    dist.all_reduce(x)
    return x


def waited(x):
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x
