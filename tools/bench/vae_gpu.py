#!/usr/bin/env python3
"""Times the decoder of Wan2.1's VAE in PyTorch, beside `tessera bench phases`.

A run decodes one steady chunk of three latents to twelve frames, with the histories of its convolutions, in bf16 and with random
weights: eager and with torch.compile, each with channels-last convolutions. It also times the encoder on one frame.

usage: vae_gpu.py [--size 480x832] [--runs 20] [--compile]

Needs PyTorch with CUDA and nothing else: the modules are written here, because the published code needs more packages and keeps its
histories in lists that torch.compile cannot trace. Prints one line of JSON per variant.
"""

import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

WIDTHS = [384, 384, 192, 96]  # from latents to pixels


class Norm(nn.Module):
    """x / ‖x‖ · √c · γ over the channels, and SiLU."""

    def __init__(self, channels):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(channels, 1, 1, 1) * 0.02 + 1)

    def forward(self, x):
        return F.silu(F.normalize(x, dim=1) * x.shape[1] ** 0.5 * self.gamma)


class Conv(nn.Module):
    """A convolution over frames that are preceded by the last two of the call before."""

    def __init__(self, c, out, kernel=(3, 3, 3), step=1):
        super().__init__()
        self.conv = nn.Conv3d(c, out, kernel, stride=(1, step, step), padding=(0, 0 if step == 2 else kernel[1] // 2, 0 if step == 2 else kernel[2] // 2))
        self.frames = kernel[0] - 1
        self.step = step

    def forward(self, x, history=None):
        if self.step == 2:
            x = F.pad(x, (0, 1, 0, 1))
        if not self.frames:
            return self.conv(x), None
        if history is None:
            history = x.new_zeros(x.shape[0], x.shape[1], self.frames, *x.shape[3:])
        x = torch.cat([history, x], dim=2)
        return self.conv(x), x[:, :, -self.frames :].contiguous(memory_format=torch.channels_last_3d)


class Block(nn.Module):
    def __init__(self, c, out):
        super().__init__()
        self.norms = nn.ModuleList([Norm(c), Norm(out)])
        self.convs = nn.ModuleList([Conv(c, out), Conv(out, out)])
        self.shortcut = nn.Conv3d(c, out, 1) if c != out else nn.Identity()

    def forward(self, x, history):
        y = x
        made = []
        for norm, conv, past in zip(self.norms, self.convs, history):
            y, new = conv(norm(y), past)
            made.append(new)
        return self.shortcut(x) + y, made


class FrameAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.qkv, self.proj = Norm(c), nn.Conv2d(c, 3 * c, 1), nn.Conv2d(c, c, 1)

    def forward(self, x):
        b, c, t, h, w = x.shape
        frames = (F.normalize(x, dim=1) * c**0.5 * self.norm.gamma).permute(0, 2, 1, 3, 4).reshape(b * t, c, h, w)
        q, k, v = self.qkv(frames).reshape(b * t, 1, 3 * c, h * w).permute(0, 1, 3, 2).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v).squeeze(1).permute(0, 2, 1).reshape(b * t, c, h, w)
        return x + self.proj(y).reshape(b, t, c, h, w).permute(0, 2, 1, 3, 4)


class Up(nn.Module):
    def __init__(self, c, doubles_frames):
        super().__init__()
        self.time = Conv(c, 2 * c, (3, 1, 1)) if doubles_frames else None
        self.conv = nn.Conv2d(c, c // 2, 3, padding=1)

    def forward(self, x, history):
        new = None
        if self.time is not None:
            y, new = self.time(x, history)
            b, c, t, h, w = y.shape
            x = y.reshape(b, 2, c // 2, t, h, w).permute(0, 2, 3, 1, 4, 5).reshape(b, c // 2, 2 * t, h, w)
        b, c, t, h, w = x.shape
        y = x.permute(0, 2, 1, 3, 4).reshape(b * t, c, h, w)
        y = self.conv(F.interpolate(y, scale_factor=2, mode="nearest-exact"))
        return y.reshape(b, t, c // 2, 2 * h, 2 * w).permute(0, 2, 1, 3, 4), new


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.conv = nn.Conv3d(16, 16, 1), Conv(16, 384)
        layers, c = [Block(384, 384), FrameAttention(384), Block(384, 384)], 384
        for level, out in enumerate(WIDTHS):
            for _ in range(3):
                layers.append(Block(c, out))
                c = out
            if level < 3:
                layers.append(Up(c, doubles_frames=level < 2))
                c //= 2
        self.layers = nn.ModuleList(layers)
        self.norm, self.head = Norm(c), Conv(c, 3)

    def forward(self, z, histories):
        made = []
        x, new = self.conv(self.start(z), histories[0])
        made.append(new)
        for layer, history in zip(self.layers, histories[1:-1]):
            new = None
            if isinstance(layer, Block):
                x, new = layer(x, history)
            elif isinstance(layer, Up):
                x, new = layer(x, history)
            else:
                x = layer(x)
            made.append(new)
        x, new = self.head(self.norm(x), histories[-1])
        made.append(new)
        return x.clamp(-1, 1), made

    def empty_histories(self):
        return [None] + [[None, None] if isinstance(l, Block) else None for l in self.layers] + [None]


class Encoder(nn.Module):
    """The encoder for one frame, without histories."""

    def __init__(self):
        super().__init__()
        layers, c = [Conv(3, 96)], 96
        for level, out in enumerate([96, 192, 384, 384]):
            for _ in range(2):
                layers.append(Block(c, out))
                c = out
            if level < 3:
                layers.append(Conv(c, c, (1, 3, 3), step=2))
        layers += [Block(384, 384), FrameAttention(384), Block(384, 384), Norm(384), Conv(384, 32), Conv(32, 32, (1, 1, 1))]
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            if isinstance(layer, Block):
                x, _ = layer(x, [None, None])
            elif isinstance(layer, Conv):
                x, _ = layer(x)
            else:
                x = layer(x)
        return x[:, :16]


def time_runs(run, runs):
    for _ in range(3):
        run()
    times = []
    for _ in range(runs):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    times.sort()
    return times


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="480x832")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    height, width = map(int, args.size.split("x"))
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    layout = {"device": "cuda", "dtype": torch.bfloat16, "memory_format": torch.channels_last_3d}
    decoder, encoder = Decoder().to("cuda", torch.bfloat16), Encoder().to("cuda", torch.bfloat16)
    for module in [*decoder.modules(), *encoder.modules()]:
        if isinstance(module, nn.Conv3d):
            module.to(memory_format=torch.channels_last_3d)
        elif isinstance(module, nn.Conv2d):
            module.to(memory_format=torch.channels_last)
    latents = torch.randn(1, 16, 3, height // 8, width // 8).to(**layout)
    frame = torch.randn(1, 3, 1, height, width).to(**layout)
    for variant in ["eager"] + ["compiled"] * args.compile:
        compiled = (lambda f: f) if variant == "eager" else (lambda f: torch.compile(f, dynamic=False))
        decode, encode = compiled(decoder), compiled(encoder)
        state = {"histories": decoder.empty_histories()}

        def run_decode():
            _, state["histories"] = decode(latents, state["histories"])

        for name, run in [("decode, 3 latents", run_decode), ("encode, 1 frame", lambda: encode(frame))]:
            times = time_runs(run, args.runs)
            print(json.dumps({"bench": "vae_gpu", "size": args.size, "variant": variant, "phase": name, "median_ms": round(times[len(times) // 2], 3),
                              "p90_ms": round(times[len(times) * 9 // 10], 3), "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
