import torch
import torch.distributed as dist

PENDING = None


class Bucket:
    def start(self, x):
        self.work = dist.all_reduce(x, async_op=True)  # expect: T1431

    def start_named(self, x):
        work = dist.all_reduce(x, async_op=True)
        self.work = work  # expect: T1431

    def start_all(self, xs):
        for x in xs:
            self.works.append(dist.all_reduce(x, async_op=True))  # expect: T1431


def returned(x):
    return dist.all_reduce(x, async_op=True)  # expect: T1431


def returned_with_tensor(x):
    work = dist.all_reduce(x, async_op=True)
    return work, x.shape  # expect: T1431


def kept_in_global(x):
    global PENDING
    PENDING = dist.all_reduce(x, async_op=True)  # expect: T1431


@torch.compile
def compiled(x):
    work = dist.all_reduce(x, async_op=True)  # expect: T1431
    work.wait()
    return x


def returned_beside_its_tensor(x):
    out = x.clone()
    work = dist.all_reduce(out, async_op=True)
    return out, work  # expect: T1431
