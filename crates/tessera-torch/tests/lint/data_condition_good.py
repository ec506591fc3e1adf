import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol


def reduced_first(x, loss):
    dist.all_reduce(loss)
    if loss.item() > 10:
        dist.all_reduce(x)


def reduced_flag(x):
    flag = torch.isnan(x).any().float()
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if flag.item() > 0:
        return None
    dist.all_reduce(x)
    return x


def functional(x, loss):
    total = funcol.all_reduce(loss, "sum", "dp")
    mean = total / 8
    if mean.item() > 1:
        dist.all_reduce(x)


def sent(x, stop):
    stop = [stop]
    dist.broadcast_object_list(stop, src=0)
    if stop[0]:
        return
    dist.all_reduce(x)


def by_own_reduction(x, loss, reduce_mean):
    loss = reduce_mean(loss)
    if loss.item() > 1:
        dist.all_reduce(x)


def local_only(x):
    if x.isnan().any():
        print("NaN")
    dist.all_reduce(x)


def every_tenth(x, step):
    if step % 10 == 0:
        dist.all_reduce(x)


def checked(x, loss):
    if loss.item() > 10:
        raise ValueError("loss")
    dist.all_reduce(x)


def agreed_by_all(hashes, own, group):
    dist.all_gather(hashes, own, group=group)
    if any(value.item() != own.item() for value in hashes):
        return
    dist.barrier()


def wrapped(x, group):
    group.broadcast(x, src=0)
    if bool(x.item()):
        dist.barrier()


def empty_item(tensors):
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        dist.broadcast(tensor, src=0)


def pairs(table):
    for members in table.tolist():
        dist.new_group(members)
