import math
import time

import torch
import torch.distributed as dist


def by_item(x, loss):
    if loss.item() > 10:
        dist.all_reduce(x)  # expect: T1436


def by_any(x):
    if torch.isnan(x).any():
        return None  # expect: T1436
    dist.all_reduce(x)
    return x


def by_variable(x, loss):
    bad = not math.isfinite(loss.item())
    if bad:
        return  # expect: T1436
    dist.all_reduce(x)


def until_converged(x, residual):
    while residual.norm() > 1e-3:
        dist.all_reduce(x)  # expect: T1436


def by_clock(x, started):
    if time.time() - started > 30:
        dist.barrier()  # expect: T1436


def by_size(tokens, out):
    if tokens.numel() == 0:
        return tokens  # expect: T1436
    dist.all_to_all_single(out, tokens)
    return out


def by_shape(tokens, out):
    if tokens.shape[0] == 0:
        return tokens  # expect: T1436
    dist.all_to_all_single(out, tokens)
    return out


def by_memory(x):
    if torch.cuda.memory_allocated() > 1e9:
        dist.barrier()  # expect: T1436
