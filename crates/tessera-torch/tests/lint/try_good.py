import os
import sys

import torch.distributed as dist


def passed_on(x):
    try:
        dist.all_reduce(x)
    except RuntimeError:
        print("lost")
        raise


def ended(x):
    try:
        dist.all_reduce(x)
    except Exception:
        sys.exit(1)


def cleaned(x):
    try:
        dist.all_reduce(x)
    finally:
        close()


def optional(x):
    try:
        import apex

        dist.all_reduce(x)
    except ImportError:
        pass


def around_the_rest(x, failed):
    try:
        step(x)
    except RuntimeError:
        failed.fill_(1)
    dist.all_reduce(failed)


def last(x, batches):
    dist.all_reduce(x)
    try:
        step(x)
    except RuntimeError:
        return None
    return next(batches)


def refused(x):
    try:
        check(x)
        dist.all_reduce(x)
    except InvalidRequestError:
        return None
