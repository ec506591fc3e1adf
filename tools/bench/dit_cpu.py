"""Times one steady chunk of the DiT on the CPU with PyTorch and prints one JSON line.

A steady chunk consists of all denoise forwards over the cached context, and the clean forward that writes the next chunk's
context.

The program has its own inference path, because tools/pytorch/wan.py is written for readability. This path fuses the q, k and v
projections, writes K/V rows in place, projects the text once per prompt (not timed), computes one time embedding for all frames,
which share t here, and uses scaled_dot_product_attention. The program compares it with wan.py before it times anything.
"""

import argparse
import json
import statistics
import sys
import time
import tomllib
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tools/pytorch"))
import wan

RANDOM = wan.Config(dim=96, ffn_dim=384, freq_dim=256, in_dim=768, out_dim=768, num_heads=4, num_layers=5, text_len=16,
                    text_dim=64)
RANDOM_STREAM = {
    "video": {"width": 128, "height": 128},
    "latent": {"stride": [4, 8, 8], "chunk_frames": 3},
    "cache": {"mode": "resident", "window_frames": 6},
    "schedule": {"steps": [1000, 750, 500, 250], "shift": 5.0, "warp": True},
}


def rotate(x, rope):
    """Rotates the pairs of x [n, heads, pairs, 2] by rope [n, 1, pairs, (cos, sin)]."""
    if torch.compiler.is_compiling():
        # The compiler fuses real arithmetic but generates no code for complex numbers.
        (a, b), (cos, sin) = x.unbind(-1), rope.unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1)
    return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(rope))


class Dit(torch.nn.Module):
    """The DiT for inference at a fixed chunk size, with the weights of a `wan.Wan` model."""

    def __init__(self, model, frames, height, width, context_frames):
        super().__init__()
        cfg = model.cfg
        w = {k: v.detach() for k, v in model.state_dict().items()}
        d, self.heads, self.eps = cfg.dim, cfg.num_heads, cfg.eps
        self.frames, self.grid, self.head_dim = frames, (height // 2, width // 2), d // cfg.num_heads
        self.tokens = self.grid[0] * self.grid[1]
        self.context = context_frames * self.tokens
        self.layers = cfg.num_layers

        def keep(name, value):
            # torch.compile can freeze parameters as constants.
            setattr(self, name, torch.nn.Parameter(value.contiguous(), requires_grad=False))

        # The weight's rows are ordered (p, q, C): in this order `forward` copies contiguous half rows of the latents.
        keep("patch_w", w["patch_embedding.weight"].permute(2, 3, 4, 1, 0).flatten(0, 3))
        keep("patch_b", w["patch_embedding.bias"])
        for short, name in (("time0", "time_embedding.0"), ("time2", "time_embedding.2"), ("proj", "time_projection.1")):
            keep(f"{short}_w", w[f"{name}.weight"])
            keep(f"{short}_b", w[f"{name}.bias"])
        keep("head_w", w["head.head.weight"])
        keep("head_b", w["head.head.bias"][:, None])
        half = cfg.freq_dim // 2
        self.register_buffer("rates", 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half))
        # Add the 1 of (1 + scale) to the modulation table once.
        one = torch.tensor([0.0, 1, 0, 0, 1, 0])[:, None]
        keep("modulation", torch.cat([w[f"blocks.{i}.modulation"] for i in range(self.layers)]) + one)
        keep("head_modulation", w["head.modulation"][0] + one[:2])
        for i in range(self.layers):
            b = f"blocks.{i}"
            for part in ("weight", "bias"):
                p = part[0]
                keep(f"qkv_{p}{i}", torch.cat([w[f"{b}.self_attn.{n}.{part}"] for n in "qkv"]))
                keep(f"o_{p}{i}", w[f"{b}.self_attn.o.{part}"])
                keep(f"cq_{p}{i}", w[f"{b}.cross_attn.q.{part}"])
                keep(f"co_{p}{i}", w[f"{b}.cross_attn.o.{part}"])
                keep(f"norm_{p}{i}", w[f"{b}.norm3.{part}"])
                keep(f"up_{p}{i}", w[f"{b}.ffn.0.{part}"])
                keep(f"down_{p}{i}", w[f"{b}.ffn.2.{part}"])
            keep(f"qk_norm{i}", torch.stack([w[f"{b}.self_attn.norm_{n}.weight"] for n in "qk"]))
            keep(f"cq_norm{i}", w[f"{b}.cross_attn.norm_q.weight"])

    def text(self, model, text):
        """Returns the cross-attention keys and values of every layer, [heads, rows, head_dim]; called once per prompt."""
        text = F.pad(text, (0, 0, 0, model.cfg.text_len - text.shape[0]))[None]
        text = model.text_embedding(text)
        split = lambda x: x.transpose(1, 2).contiguous()
        return [tuple(split(f(text)) for f in (b.cross_attn.keys, b.cross_attn.values)) for b in model.blocks]

    def cache(self):
        """Returns an empty cache of K and V rows of every layer: first those of the context, then those of the chunk."""
        rows = self.context + self.frames * self.tokens
        return torch.zeros(self.layers, 2, rows, self.heads, self.head_dim)

    def angles(self, start):
        a = wan.rope_angles(self.head_dim, start, self.frames, *self.grid, "cpu")[0]
        return torch.stack([a.cos(), a.sin()], dim=-1).float()[:, None]

    def attend(self, q, k, v):
        out = F.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).flatten(2)

    def forward(self, x, t, rope, text, cache):
        """x [C, F, H, W], t [1]; fills the chunk's rows of `cache` and returns the prediction [C, F, H, W]."""
        c, f = x.shape[:2]
        h, w = self.grid
        d = self.heads * self.head_dim
        n = f * h * w
        # Stack the frames as one tall image.
        x = x.view(c, f * h, 2, w, 2).permute(2, 4, 0, 1, 3).reshape(4 * c, n)
        x = torch.addmm(self.patch_b, x.t(), self.patch_w)[None]

        angle = t.double() * self.rates
        e = torch.cat([angle.cos(), angle.sin()]).float()
        e = F.linear(F.silu(F.linear(e, self.time0_w, self.time0_b)), self.time2_w, self.time2_b)
        e0 = F.linear(F.silu(e), self.proj_w, self.proj_b).view(6, d)
        modulation = self.modulation + e0
        for i in range(self.layers):
            shift, scale, gate, shift_ff, scale_ff, gate_ff = modulation[i].unbind()
            get = lambda name: (getattr(self, f"{name}_w{i}"), getattr(self, f"{name}_b{i}"))

            y = F.layer_norm(x, (d,), scale, shift, self.eps)
            qkv = F.linear(y, *get("qkv")).view(n, 3, d)
            qk = F.rms_norm(qkv[:, :2], (d,), None, self.eps) * getattr(self, f"qk_norm{i}")
            qk = rotate(qk.view(n, 2 * self.heads, -1, 2), rope).view(n, 2, self.heads, -1)
            kv = cache[i]
            kv[0, self.context:] = qk[:, 1]
            kv[1, self.context:] = qkv[:, 2].view(n, self.heads, -1)
            y = self.attend(qk[None, :, 0].transpose(1, 2), *kv[:, None].transpose(2, 3))
            x = torch.addcmul(x, F.linear(y, *get("o")), gate)

            y = F.layer_norm(x, (d,), *get("norm"), self.eps)
            q = F.rms_norm(F.linear(y, *get("cq")), (d,), getattr(self, f"cq_norm{i}"), self.eps)
            y = self.attend(q.view(1, n, self.heads, -1).transpose(1, 2), *text[i])
            x = x + F.linear(y, *get("co"))

            y = F.layer_norm(x, (d,), scale_ff, shift_ff, self.eps)
            y = F.linear(F.gelu(F.linear(y, *get("up")), approximate="tanh"), *get("down"))
            x = torch.addcmul(x, y, gate_ff)
        shift, scale = (self.head_modulation + e).unbind()
        x = F.layer_norm(x[0], (d,), scale, shift, self.eps)
        x = torch.addmm(self.head_b, self.head_w, x.t()).view(2, 2, -1, f * h, w)
        return x.permute(2, 3, 0, 4, 1).reshape(-1, f, 2 * h, 2 * w)


def read(folder):
    cfg = wan.Config.read(folder / "config.json")
    state = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    return cfg, state, tomllib.loads((folder / "stream.toml").read_text())


def random_state(model):
    torch.manual_seed(0)
    return {k: torch.randn_like(v) / v[0].numel() ** 0.5 if v.dim() > 1 else 1 + 0.2 * torch.randn_like(v)
            for k, v in model.state_dict().items()}


def compare(model, dit, forward, text, x):
    """Computes consecutive chunks by both paths, each with the clean rows of the one before as context, and returns the largest
    relative error."""
    frames = dit.frames
    cache, cross, kv, worst = dit.cache(), dit.text(model, text), None, 0.0
    for chunk in range(dit.context // (frames * dit.tokens) + 1):
        for t in (937.5, 0.0):
            expected, own = model(x[None], torch.full((1, frames), t), text[None], start_frame=chunk * frames, kv=kv)
            output = forward(x, torch.tensor([t]), dit.angles(chunk * frames), cross, cache)
            if kv is not None:
                worst = max(worst, ((output - expected[0]).abs().max() / expected.abs().max()).item())
        dit_rows = cache[:, :, dit.context:]
        for layer, rows in zip(own, dit_rows):
            if kv is not None:
                worst = max(worst, *((a[0] - b).abs().max().item() / a.abs().max().item() for a, b in zip(layer, rows)))
        kv = own
        # The fast path always reads a full context, so fill it with the reference's rows.
        cache[:, :, :dit.context] = torch.stack([torch.stack([k[0], v[0]]) for k, v in own])
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, default=REPO / "models/demo", help="model folder")
    source.add_argument("--random", action="store_true", help="use a built-in configuration with random weights instead of a model")
    parser.add_argument("--chunks", type=int, default=40, help="number of chunks to time")
    parser.add_argument("--warmup", type=int, default=10, help="number of chunks before timing starts")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--compile", action="store_true", help="use torch.compile with frozen weights")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    if args.random:
        cfg, stream = RANDOM, RANDOM_STREAM
        model = wan.Wan(cfg)
        state = random_state(model)
    else:
        cfg, state, stream = read(args.model)
        model = wan.Wan(cfg)
    model.load_state_dict(state, strict=True)
    model.eval().requires_grad_(False)

    stride, frames = stream["latent"]["stride"], stream["latent"]["chunk_frames"]
    height, width = stream["video"]["height"] // stride[1], stream["video"]["width"] // stride[2]
    context = stream["cache"]["window_frames"] - frames
    assert stream["cache"]["mode"] == "resident" and context == frames, "the stream must have a resident cache with one chunk of context"
    schedule = stream["schedule"]
    levels = wan.sigmas(schedule["steps"], schedule["shift"], schedule["warp"])
    steps = [torch.tensor([1000 * level]) for level in levels.tolist()] + [torch.zeros(1)]

    dit = Dit(model, frames, height, width, context).eval()
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(cfg.in_dim, frames, height, width, generator=gen)
    text = torch.randn((cfg.text_len + 1) // 2, cfg.text_dim, generator=gen)

    with torch.inference_mode():
        forward = dit
        if args.compile:
            import torch._inductor.config as inductor
            inductor.freezing = True
            forward = torch.compile(dit, fullgraph=True, dynamic=False)
        error = compare(model, dit, forward, text, x)
        assert error < 1e-4, f"the fast path differs from wan.py by a relative error of {error:.1e}"

        cross, cache, start = dit.text(model, text), dit.cache(), frames
        cache.normal_(generator=gen)

        def chunk():
            rope = dit.angles(start)
            for t in steps:
                out = forward(x, t, rope, cross, cache)
            cache[:, :, :dit.context] = cache[:, :, dit.context:]
            return out

        times = []
        for i in range(args.warmup + args.chunks):
            begin = time.perf_counter()
            chunk()
            if i >= args.warmup:
                times.append((time.perf_counter() - begin) * 1e3)
            start = (start + frames) % 1000
    print(json.dumps({
        "side": "pytorch", "mode": "compile" if args.compile else "eager", "median_ms": round(statistics.median(times), 3),
        "min_ms": round(min(times), 3), "chunks": args.chunks, "forwards": len(steps), "threads": args.threads,
        "torch": torch.__version__, "error": float(f"{error:.1e}"),
        "dim": cfg.dim, "layers": cfg.num_layers, "tokens": frames * dit.tokens,
    }))


if __name__ == "__main__":
    main()
