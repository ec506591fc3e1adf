import os

import torch.distributed as dist

DEBUG = os.environ.get("MY_DEBUG", "0") == "1"


def always(x):
    dist.barrier()
    if DEBUG:
        print(x)


def if_distributed(x):
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.barrier()


def agreed(x):
    debug = [os.environ.get("MY_DEBUG")]
    dist.broadcast_object_list(debug, src=0)
    if debug[0]:
        dist.barrier()


def configured(x):
    if os.environ.get("SEQUENCE_BACKEND") == "ring":
        dist.barrier()
