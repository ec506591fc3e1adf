"""A training loop with sharded parameters."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU())

    def forward(self, x):
        return self.layers(x)


def clip(parameters, limit, group):
    total = sum(p.grad.float().pow(2).sum() for p in parameters)
    dist.all_reduce(total, group=group)
    norm = total.sqrt()
    if norm.item() > limit:
        for p in parameters:
            p.grad.mul_(limit / norm)
    return norm


def evaluate(model, loader):
    seen = torch.zeros(2, device="cuda")
    with torch.no_grad():
        for x, y in loader:
            seen[0] += (model(x).argmax(-1) == y).sum()
            seen[1] += y.numel()
    dist.all_reduce(seen)
    return (seen[0] / seen[1]).item()


def train(model, loader, optimizer, steps):
    rank = dist.get_rank()
    for step, (x, y) in zip(range(steps), loader):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        clip(list(model.parameters()), 1.0, None)
        optimizer.step()
        if step % 100 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown, op=dist.ReduceOp.AVG)
            if rank == 0:
                print(step, shown.item())
    state = model.state_dict()
    if rank == 0:
        torch.save(state, "model.pt")
    dist.barrier()


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = FSDP(Net(64).cuda())
    model = torch.compile(model)
    train(model, [], torch.optim.AdamW(model.parameters()), 10)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
