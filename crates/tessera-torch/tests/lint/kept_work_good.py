import torch.distributed as dist


def local(x, y):
    work = dist.all_reduce(x, async_op=True)
    z = y * 2
    work.wait()
    return x + z


def list_of_all(xs):
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    for work in works:
        work.wait()


def appended(xs):
    works = []
    for x in xs:
        works.append(dist.all_reduce(x, async_op=True))
    for work in works:
        work.wait()


def at_once(x):
    dist.all_reduce(x, async_op=True).wait()
    return x


def asked_for(x, overlap):
    return dist.all_reduce(x, async_op=overlap)
