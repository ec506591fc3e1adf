import torch


@torch.compile
def staying(x, scale):
    x = torch.where(scale > 1, x / scale, x)
    return x.to("cuda").to(torch.bfloat16)


def eager(x):
    return staying(x, x.max()).cpu().tolist()
