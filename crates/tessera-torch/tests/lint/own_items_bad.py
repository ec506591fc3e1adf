import torch.distributed as dist


def every_nth(files, rank, size):
    for name in files[rank::size]:
        dist.all_reduce(load(name))  # expect: T1444


def own_range(x):
    for i in range(dist.get_rank()):
        dist.barrier()  # expect: T1444


def counted(x, counts):
    for i in range(counts.sum().item()):
        dist.all_reduce(x)  # expect: T1436
