import torch.distributed as dist


def known(x, rank):
    if rank == 0:
        dist.barrier()  # tessera: ignore T1435
    if rank == 1:
        dist.barrier()  # tessera: ignore T1436 expect: T1435
    text = "# tessera: ignore T1435"
    return text
