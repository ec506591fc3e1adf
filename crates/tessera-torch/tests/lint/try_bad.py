import torch.distributed as dist


def goes_on(x):
    try:
        step(x)
        dist.all_reduce(x)  # expect: T1438
    except RuntimeError as e:
        print(e)


def in_handler(x):
    try:
        step(x)
    except RuntimeError:
        dist.barrier()  # expect: T1438
        raise


def retried(x):
    while True:
        try:
            return reduce(x)  # expect: T1438
        except Exception:
            continue


def reduce(x):
    dist.all_reduce(x)
    return x


def leaves(x):
    try:
        step(x)
    except RuntimeError:
        return None  # expect: T1438
    dist.all_reduce(x)
    return x
