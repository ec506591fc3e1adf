import torch


@torch.compile
def reading(x, scale):
    if scale.item() > 1:  # expect: T1442
        x = x / scale
    sizes = scale.tolist()  # expect: T1442
    y = x.to("cpu")  # expect: T1442
    torch.cuda.synchronize()  # expect: T1442
    return x.cpu()  # expect: T1442
