import torch.distributed as dist


def broken(x, rank):
    y = x +* 2 2  # expect: T1430
    return y


def whole(x, rank):
    if rank == 0:
        dist.barrier()  # expect: T1435
