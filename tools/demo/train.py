"""Trains the demo model on its own rollouts. README.md in this folder gives the reasons for the method."""

import argparse
import copy
import json
import math
import sys
import time
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "pytorch")]
import wan  # noqa: E402
from world import COLORS, DIRECTIONS, PROMPTS, SHAPES, World, to_pixels, to_tokens  # noqa: E402

VOCAB = ["a", *COLORS, *SHAPES, "moves", *DIRECTIONS]
LEVELS = wan.sigmas([1000, 750, 500, 250])
SIDE, FRAME, CHUNK = 8, 64, 192
HIDDEN_KEY = -1e4


class Demo(nn.Module):
    """The generator and its word table."""

    def __init__(self, cfg):
        super().__init__()
        self.wan = wan.Wan(cfg)
        self.words = nn.Embedding(len(VOCAB), cfg.text_dim)
        rows = [[VOCAB.index(w) for w in p.split()] for p in PROMPTS]
        self.register_buffer("rows", torch.tensor(rows), persistent=False)

    def text(self, prompt):
        return self.words(self.rows[prompt])


def initialize_layers(demo, world, device):
    """Initialises the two wide layers with the principal components of rendered patches, and the patch embedding with the sums
    that chunk 0 must read from its noise. Training could learn both, but would need many more steps."""
    model, dim = demo.wan, demo.wan.cfg.dim
    count = 512 if device == "cuda" else 48
    prompt = torch.randint(48, (count,), device=device)
    position = torch.randint(16, (count, 2), device=device) * 8
    background = torch.randint(8, (count,), device=device)
    x = to_tokens(world.render(prompt, position, background)).flatten(0, 1)
    mean = x.mean(0)
    x = x - mean
    variance, basis = torch.linalg.eigh((x.T @ x / len(x)).double())
    basis = basis.flip(1).T[:dim].float()
    std = variance.flip(0)[:dim].clamp(min=0).sqrt().float()
    with torch.no_grad():
        model.head.head.weight.copy_((basis * std[:, None]).T)
        model.head.head.bias.copy_(mean)
        rows = basis / (1 + std[:, None] / 4)
        # The sums of `World.first_clip`, as unit vectors.
        dy = torch.eye(8, device=device)[:, None, None, None, :, None, None]
        dy = dy.expand(8, 2, 2, 4, 8, 8, 3).flatten(1)
        sums = torch.cat([dy, torch.ones(1, 3072, device=device)])
        rows[-9:] = sums / sums.norm(dim=1, keepdim=True)
        # The rows are in token order (p, q, C); the weight is [dim, C, 1, p, q].
        weight = rows.unflatten(1, (1, 2, 2, 768)).permute(0, 4, 1, 2, 3)
        model.patch_embedding.weight.copy_(weight)
        model.patch_embedding.bias.zero_()
        for block in model.blocks:
            block.modulation[:, [2, 5]] = 1.0
            block.self_attn.norm_q.weight.fill_(1.5)
            block.self_attn.norm_k.weight.fill_(1.5)


class Streams:
    """The streams in training, resident ones first. Each training step advances every stream by one chunk.

    A step also starts `fresh` new streams at chunk 0, which replace others. The streams in the first half of each regime are
    replaced often and those in the second half seldom, so that training covers both young and old streams."""

    def __init__(self, demo, world, each, fresh, device):
        self.demo, self.world, self.device = demo, world, device
        self.each, self.fresh = each, fresh
        n, cfg = 2 * each, demo.wan.cfg
        self.prompt = torch.randint(48, (n,), device=device)
        position = torch.randint(16, (n, 2), device=device) * 8
        self.background = torch.randint(8, (n,), device=device)
        self.z = to_tokens(world.render(self.prompt, position, self.background))
        self.position = world.next_position(self.prompt, position)
        self.chunk = torch.ones(n, dtype=torch.long, device=device)
        shape = each, CHUNK, cfg.num_heads, cfg.dim // cfg.num_heads
        self.past = [tuple(torch.zeros(2, *shape, device=device)) for _ in range(cfg.num_layers)]
        clip = world.backgrounds[:, None].expand(-1, 4, -1, -1, -1)
        self.background_patches = to_tokens(clip)[:, 0].contiguous()
        self.own_rate = torch.zeros((), device=device)
        self.radix = torch.tensor([12, 4, 1], device=device), torch.tensor([4, 3, 4], device=device)

    def run(self, x, level, text, start, kv=None, bias=None):
        t = torch.full((len(x), 3), 1000 * level, dtype=torch.float64, device=self.device)
        return self.demo.wan.on_tokens(x, t, text, SIDE, SIDE, start, kv, bias)

    def next_prompts(self, rate):
        """Returns the prompts of the next chunk: some streams get a new prompt, and half of these change only one attribute."""
        n, old = len(self.prompt), self.prompt
        new = torch.randint(48, (n,), device=self.device)
        base, size = self.radix
        parts_old = old[:, None] // base % size
        parts_new = new[:, None] // base % size
        which = torch.randint(6, (n, 1), device=self.device)
        pick = (which >= 3) | (which == torch.arange(3, device=self.device))
        mixed = (torch.where(pick, parts_new, parts_old) * base).sum(1)
        return torch.where(torch.rand(n, device=self.device) < rate, mixed, old)

    def loss_weight(self, target, background):
        """Returns the loss weights [B, 192]. Patches with a part of the object have a higher weight, because most patches show
        only background, which is easy to learn."""
        ground = self.background_patches[background][:, None]
        return 1 + 4 * ((target - ground).abs().amax(2) > 0.05).float()

    def step(self, switch_rate=0.2):
        """Computes the loss of one chunk of every stream and advances the streams. A stream continues from its own output with
        probability `own_rate`, and from the true clip otherwise. The step does not synchronise with the device, so that one CUDA
        graph can capture it."""
        demo, world, dev = self.demo, self.world, self.device
        n, m, f = self.each, 2 * self.each, self.fresh
        old = self.prompt
        prompt = torch.cat([self.next_prompts(switch_rate), torch.randint(48, (f,), device=dev)])
        chunk = torch.cat([self.chunk, torch.zeros(f, dtype=torch.long, device=dev)])
        draw = torch.randn(m + f, CHUNK, 3072, device=dev)
        start_position, start_background = world.first_clip(draw[m:])
        position = torch.cat([self.position, start_position])
        background = torch.cat([self.background, start_background])
        target = to_tokens(world.render(prompt, position, background))
        loss_weight = self.loss_weight(target, background)
        text = demo.text(prompt)

        # The context of resident streams comes from the clean forward of the previous chunk.
        hidden = torch.zeros(n, 2 * CHUNK, device=dev)
        hidden[:, :CHUNK] = torch.where(self.chunk[:n, None] == 1, HIDDEN_KEY, 0.0)
        z = self.z[:n]
        start = 3 * (self.chunk[:n] - 1)
        out, resident_kv = self.run(z, 0.0, demo.text(old[:n]), start, self.past, hidden)
        loss = (out.float() - z).square().mean() * 0.1
        # The context of recompute streams comes from the anchor and the last two latents, with the new prompt.
        z = self.z[n:]
        first = z[:, :FRAME].unflatten(2, (4, 4, 192))[:, :, :, -1:].clamp(-1, 1)
        first = first.expand(-1, -1, -1, 4, -1).flatten(2)
        first = torch.where(self.chunk[n:, None, None] == 1, z[:, :FRAME], first)
        z = torch.cat([first, z[:, FRAME:]], dim=1)
        out, recompute_kv = self.run(z, 0.0, text[n:m], torch.zeros_like(start))
        loss = loss + (out.float() - z).square().mean() * 0.1

        pad = recompute_kv[0][0].new_zeros(f, *recompute_kv[0][0].shape[1:])
        kv = [tuple(torch.cat([*p, pad]) for p in zip(a, b)) for a, b in zip(resident_kv, recompute_kv)]
        bias = torch.zeros(m + f, 2 * CHUNK, device=dev)
        weak = torch.rand(n, 1, device=dev) < 0.4
        bias[n:m, FRAME:CHUNK] = torch.where(weak, math.log(0.3), 0.0)
        bias[m:, :CHUNK] = HIDDEN_KEY
        start = torch.where(torch.arange(m + f, device=dev) < n, 3 * chunk, 3 * (chunk > 0))

        own = torch.rand(m + f, device=dev) < self.own_rate
        x0, losses = None, []
        for i, level in enumerate(LEVELS.tolist()):
            if i:
                draw = torch.randn_like(target)
                draw.mul_(level).add_(torch.where(own[:, None, None], x0, target), alpha=1 - level)
            out = self.run(draw, level, text, start, kv, bias)[0].float()
            if i:
                # The first draw may be a tie between two clips. From the second step on, the target is the valid clip nearest to
                # the model's own choice.
                pixels = to_pixels((x0 + out.detach())[m:] / 2)
                p, b = world.nearest(prompt[m:], pixels)
                p = torch.where(own[m:, None], p, position[m:])
                b = torch.where(own[m:], b, background[m:])
                target[m:] = to_tokens(world.render(prompt[m:], p, b))
                loss_weight = torch.cat([loss_weight[:m], self.loss_weight(target[m:], b)])
            x0 = out.detach()
            error = (out - target).square().mean(2)
            losses.append(torch.stack([error[:m].mean(), error[m:].mean()]).detach())
            loss = loss + (error * loss_weight).mean() * (2 if i == 3 else 1)

        with torch.no_grad():
            z = torch.where(own[:, None, None], x0, target)
            p, b = world.nearest(prompt, to_pixels(z))
            wrong = ((p != position).any(1) | (b != background))[:m].float().mean()
            self.advance(prompt, p, b, z, chunk, kv)
        return loss, torch.stack(losses), wrong

    def advance(self, prompt, position, background, z, chunk, kv):
        n, m, f = self.each, 2 * self.each, self.fresh
        index = torch.arange(m, device=self.device)
        # Replace fresh / 2 streams of each regime: an eighth of them from its second half, the others from its first half.
        young, old = f // 2 - f // 16, f // 16
        for offset in (0, n):
            half = n // 2
            a = torch.rand(half, device=self.device).argsort()[:young] + offset
            b = torch.rand(n - half, device=self.device).argsort()[:old] + offset + half
            source = m + (f // 2 if offset else 0)
            index[torch.cat([a, b])] = torch.arange(source, source + f // 2, device=self.device)
        # Write in place, because a captured graph reads and writes these tensors.
        self.prompt.copy_(prompt[index])
        self.background.copy_(background[index])
        self.z.copy_(z[index])
        self.position.copy_(self.world.next_position(prompt, position)[index])
        self.chunk.copy_(chunk[index] + 1)
        for past, new in zip(self.past, kv):
            for a, b in zip(past, new):
                a.copy_(b[index[:n]])


def parameter_groups(demo, rate):
    """Returns the optimizer's parameter groups. The patch embedding sums 3072 correlated values, so its learning rate is
    lower."""
    wide, matrices, rest = [], [], []
    for name, p in demo.named_parameters():
        if name.startswith("wan.patch_embedding"):
            wide.append(p)
        elif p.ndim == 2 and "words" not in name:
            matrices.append(p)
        else:
            rest.append(p)
    return [
        dict(params=wide, lr=0.1 * rate, weight_decay=0.0),
        dict(params=matrices, lr=rate, weight_decay=0.01),
        dict(params=rest, lr=rate, weight_decay=0.0),
    ]


def ramp(x, start, end):
    return min(max((x - start) / (end - start), 0.0), 1.0)


def train(args):
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = args.device
    cfg = wan.Config(
        dim=args.dim, ffn_dim=4 * args.dim, freq_dim=64, in_dim=768, out_dim=768,
        num_heads=4, num_layers=args.layers, text_len=8, text_dim=32,
    )
    wan.Wan.rope_dtype = torch.float32
    world, demo = World(device), Demo(cfg).to(device)
    initialize_layers(demo, world, device)
    if args.resume:
        demo.load_state_dict(torch.load(args.resume, map_location=device))
    average = copy.deepcopy(demo).requires_grad_(False)
    streams = Streams(demo, world, args.each, args.fresh, device)
    if args.compile:
        for block in demo.wan.blocks:
            block.forward = torch.compile(block.forward, dynamic=False)
    if args.muon:
        hidden = [p for p in demo.wan.blocks.parameters() if p.ndim == 2]
        ids = {id(p) for p in hidden}
        rest = parameter_groups(demo, args.rate)
        for g in rest:
            g["params"] = [p for p in g["params"] if id(p) not in ids]
        muon = torch.optim.Muon(
            hidden, lr=args.rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        )
        optimizers = [muon, torch.optim.AdamW(rest, betas=(0.9, 0.98), fused=True)]
    else:
        optimizers = [torch.optim.AdamW(parameter_groups(demo, args.rate), betas=(0.9, 0.98), fused=True)]
    rates = [[g["lr"] for g in o.param_groups] for o in optimizers]

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    log = open(out / "log.txt", "a")
    begin = mark = time.time()
    step = 0
    total = torch.zeros(4, 2, device=device)
    wrong_total = torch.zeros((), device=device)

    def forward_backward():
        with torch.autocast(device, torch.bfloat16, enabled=args.bf16):
            loss, losses, wrong = streams.step()
        loss.backward()
        with torch.no_grad():
            total.add_(losses)
            wrong_total.add_(wrong)

    if device == "cuda":
        # The model is so small that its kernels take longer to launch one by one than to run.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                forward_backward()
                demo.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward_backward()
        advance = graph.replay
        total.zero_()
        wrong_total.zero_()
        print(f"the CUDA graph was captured after {time.time() - begin:.0f} s", flush=True)
    else:
        advance = forward_backward

    while True:
        done = (time.time() - begin) / (60 * args.minutes)
        if done >= 1 or step == args.max_steps:
            break
        # The learning rate warms up, stays constant, and then decays as a cosine. The constant part is long, because the model
        # learns the hard parts there.
        fall = 0.5 * (1 + math.cos(math.pi * ramp(done, args.hold, 1)))
        scale = min(1, (step + 1) / 200) * (0.01 + 0.99 * fall)
        for o, base in zip(optimizers, rates):
            for g, r in zip(o.param_groups, base):
                g["lr"] = r * scale
        own_rate = 1.0 if args.resume else ramp(done, args.own_start, args.own_end)
        streams.own_rate.fill_(own_rate)
        advance()
        torch.nn.utils.clip_grad_norm_(demo.parameters(), 1.0)
        for o in optimizers:
            o.step()
        if device != "cuda":
            demo.zero_grad(set_to_none=True)
        decay = min(0.999, (step + 1) / (step + 20))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(demo.parameters()), 1 - decay)
        step += 1
        if step % args.every == 0:
            psnr = 10 * torch.log10(4 * args.every / total)
            speed = args.every / (time.time() - mark)
            line = (
                f"step {step}, {time.time() - begin:.0f} s, {speed:.1f} steps/s, own rate {own_rate:.2f}, "
                "PSNR in dB by denoise step: later chunks "
                + " ".join(f"{x:.1f}" for x in psnr[:, 0].tolist())
                + ", first chunks " + " ".join(f"{x:.1f}" for x in psnr[:, 1].tolist())
                + f"; share of wrong clips {wrong_total.item() / args.every:.4f}, oldest stream {streams.chunk.max().item()} chunks"
            )
            print(line, flush=True)
            print(line, file=log, flush=True)
            total.zero_()
            wrong_total.zero_()
            mark = time.time()
        if step % (10 * args.every) == 0:
            save_raw(out, demo, average)
    save_raw(out, demo, average)
    wan.Wan.rope_dtype = torch.float64
    save(average, out)


def save_raw(out, demo, average):
    for name, model in (("raw", demo), ("average", average)):
        torch.save(model.state_dict(), out / f"{name}.tmp")
        (out / f"{name}.tmp").rename(out / f"{name}.pt")


def save(demo, out):
    from safetensors.torch import save_file

    cfg = demo.wan.cfg
    config = {"_class_name": "WanModel", "model_type": "t2v"}
    for key in ("dim", "ffn_dim", "freq_dim", "in_dim", "out_dim", "num_heads", "num_layers"):
        config[key] = getattr(cfg, key)
    config |= {"text_len": cfg.text_len, "text_dim": cfg.text_dim, "patch_size": [1, 2, 2]}
    config["eps"] = cfg.eps
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    state = demo.wan.state_dict().items()
    state = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in state}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    words = {"words.weight": demo.words.weight.detach().float().cpu()}
    save_file(words, out / "text_encoder.safetensors")
    (out / "vocab.txt").write_text("\n".join(VOCAB) + "\n")


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--out", default="out", help="folder for the model, checkpoints and the log")
    p.add_argument("--minutes", type=float, default=20.0, help="training time")
    p.add_argument("--max-steps", type=int, default=-1, help="maximum number of steps (default: no maximum)")
    p.add_argument("--dim", type=int, default=128, help="model width")
    p.add_argument("--layers", type=int, default=4, help="number of transformer blocks")
    p.add_argument("--each", type=int, default=64, help="streams per cache regime")
    p.add_argument("--fresh", type=int, default=48, help="new streams per step")
    p.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    p.add_argument("--hold", type=float, default=0.4, help="share of the training time after which the learning rate decays")
    p.add_argument("--own-start", type=float, default=0.15, help="share of the training time after which streams begin to continue from the model's own output")
    p.add_argument("--own-end", type=float, default=0.4, help="share of the training time after which all streams do so")
    p.add_argument("--resume", help="checkpoint raw.pt to start from")
    p.add_argument("--every", type=int, default=100, help="steps between two lines of the log")
    p.add_argument("--seed", type=int, default=1, help="seed of weights and data")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for flag in ("compile", "bf16", "muon"):
        p.add_argument(f"--{flag}", action=argparse.BooleanOptionalAction, default=True)
    train(p.parse_args())


if __name__ == "__main__":
    main()
