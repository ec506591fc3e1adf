import torch.distributed as dist


def even_and_odd(x, y, rank, size):
    if rank % 2 == 0:
        dist.send(x, dst=(rank + 1) % size)
        dist.recv(y, src=(rank - 1) % size)
    else:
        dist.recv(y, src=(rank - 1) % size)
        dist.send(x, dst=(rank + 1) % size)


def together(x, y, rank, size):
    ops = [
        dist.P2POp(dist.isend, x, (rank + 1) % size),
        dist.P2POp(dist.irecv, y, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def receives_first(x, y, previous_rank, next_rank):
    dist.recv(y, previous_rank)
    dist.send(x, next_rank)
