import torch.distributed as dist


def same_on_both(x, rank):
    if rank == 0:
        dist.broadcast(x, src=0)
    else:
        dist.broadcast(x, src=0)


def objects(rank):
    if rank == 0:
        values = ["a"]
        dist.broadcast_object_list(values, src=0)
    else:
        values = [None]
        dist.broadcast_object_list(values, src=0)
    return values


def write_then_wait(state, rank):
    if rank == 0:
        write(state)
    dist.barrier()


def first_rank_first(rank):
    if rank not in [-1, 0]:
        dist.barrier()
    download()
    if rank == 0:
        dist.barrier()


def first_rank_first_by_inequality(local_rank):
    if local_rank > 0:
        dist.barrier()
    download()
    if local_rank == 0:
        dist.barrier()


def gathered_then_written(x, out, rank):
    dist.all_gather_into_tensor(out, x)
    if rank != 0:
        return
    write(out)


def both_return(x, rank):
    if rank == 0:
        dist.broadcast(x, 0)
        return x
    dist.broadcast(x, 0)
    return x


def members_only(x, rank, members, group):
    if rank in members:
        dist.all_reduce(x, group=group)


def other_axis(x, pp_rank, tp_group):
    if pp_rank == 0:
        dist.all_reduce(x, group=tp_group)


def across_hosts(x, local_rank, host_group):
    if local_rank == 0:
        dist.all_reduce(x, group=host_group)


def checked(rank, world_size):
    if rank >= world_size:
        raise ValueError("rank")
    dist.barrier()


def pipeline(x, rank):
    if rank == 0:
        dist.send(x, dst=1)
    else:
        dist.recv(x, src=0)


def uniform(x, world_size, group=None):
    if world_size == 1 or group is None:
        return x
    dist.all_reduce(x, group=group)
    return x


def low_rank(x, lora_rank):
    if lora_rank > 0:
        dist.all_reduce(x)


def first_rank_first_by_helper():
    if not is_main_process():
        dist.barrier()
    download()
    if is_main_process():
        dist.barrier()


def made_from_the_rank(x, rank):
    handles, is_shared = export_handles(x, rank)
    if is_shared:
        dist.all_gather_object([None], handles)


def sizes(x, batch_per_rank):
    if len(set(batch_per_rank)) == 1:
        return None
    dist.all_reduce(x)


def first_four(x, rank, enabled, group):
    if enabled and rank < 4:
        dist.all_reduce(x, group=group)
