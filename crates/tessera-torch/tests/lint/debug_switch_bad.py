import os

import torch.distributed as dist

DEBUG = os.environ.get("MY_DEBUG", "0") == "1"


def by_constant(x):
    if DEBUG:
        dist.barrier()  # expect: T1437


def by_call(x):
    if os.getenv("CHECK_SHAPES"):
        dist.all_gather_object([None], x.shape)  # expect: T1437


class Layer:
    def __init__(self):
        self.trace = "TRACE" in os.environ
        self.debug = os.environ["DEBUG"]

    def forward(self, x):
        if self.debug:
            dist.barrier()  # expect: T1437
