import torch.distributed as dist


def ring(x, y, rank, size):
    dist.send(x, dst=(rank + 1) % size)  # expect: T1443
    dist.recv(y, src=(rank - 1) % size)


def by_name(x, y, next_rank, previous_rank):
    for _ in range(3):
        dist.send(x, next_rank)  # expect: T1443
        dist.recv(y, previous_rank)
