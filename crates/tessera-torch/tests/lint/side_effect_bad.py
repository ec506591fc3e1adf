import logging
import random
import time

import torch

logger = logging.getLogger(__name__)
HISTORY = []
COUNT = 0


@torch.compile
def printing(x):
    print(x.shape)  # expect: T1441
    logger.info("x")  # expect: T1441
    logging.warning("x")  # expect: T1441
    started = time.perf_counter()  # expect: T1441
    scale = random.random()  # expect: T1441
    return x * scale


@torch.compile
def remembering(x):
    global COUNT  # expect: T1441
    COUNT += 1
    HISTORY.append(x)  # expect: T1441
    return helper(x)


def helper(x):
    print("helper")  # expect: T1441
    return x
