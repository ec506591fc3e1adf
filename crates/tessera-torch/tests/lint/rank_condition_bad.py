import os
import sys

import torch
import torch.distributed as dist


def one_rank(x, rank):
    if rank == 0:
        dist.barrier()  # expect: T1435


def by_call(x):
    if dist.get_rank() == 0:
        print("saving")
        dist.all_reduce(x)  # expect: T1435
    else:
        print("waiting")


def by_variable(x):
    is_writer = dist.get_rank() == 0
    if is_writer:
        dist.broadcast(x, 0)  # expect: T1435


def different_arms(x, rank):
    if rank == 0:
        dist.broadcast(x, 0)  # expect: T1435
    else:
        dist.all_reduce(x)


def early_return(x, rank):
    if rank != 0:
        return None  # expect: T1435
    dist.all_reduce(x)
    return x


def skipped_item(xs, rank):
    for i, x in enumerate(xs):
        if i == rank:
            continue  # expect: T1435
        dist.all_reduce(x)


def left_loop(xs, rank):
    for x in xs:
        dist.all_reduce(x)
        if rank == 0 and x is None:
            break  # expect: T1435


def raised(x):
    if int(os.environ["LOCAL_RANK"]) == 0:
        raise RuntimeError("no data")  # expect: T1435
    dist.barrier()


def ended(x, local_rank):
    if local_rank:
        sys.exit(1)  # expect: T1435
    dist.barrier()


def save(state):
    dist.barrier()
    write(state)


class Trainer:
    def __init__(self):
        self.is_writer = dist.get_rank() == 0

    def finish(self, state):
        if self.is_writer:
            save(state)  # expect: T1435

    def short(self, state):
        self.is_writer and save(state)  # expect: T1435
        return dist.barrier() if self.is_writer else None  # expect: T1435


def made_by_one(rank):
    if rank < 2:
        return dist.new_group([0, 1])  # expect: T1435


def of_the_axis(x, tp_rank, tp_group):
    if tp_rank == 0:
        dist.all_reduce(x, group=tp_group)  # expect: T1435


def only_one_half(x, rank):
    if rank == 0:
        dist.barrier()  # expect: T1435
    prepare(x)
    if rank == 1:
        dist.barrier()  # expect: T1435


def by_helper(x):
    if is_main_process():
        dist.barrier()  # expect: T1435


def by_device(x):
    if torch.cuda.current_device() == 0:
        dist.barrier()  # expect: T1435


def by_case(rank):
    match rank:
        case 0:
            dist.barrier()  # expect: T1435
        case _:
            pass


def by_predicate(rank):
    if is_leader(rank):
        dist.barrier()  # expect: T1435


def by_flag_of_the_enclosing_function(rank, group):
    is_odd = rank == 1

    def step(x, case):
        if case == "other" and is_odd:
            dist.all_reduce(x, group=group)  # expect: T1435

    return step
