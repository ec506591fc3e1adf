"""The Wan2.1 causal video DiT in plain PyTorch, at any size.

Parameter names are those of the original Wan checkpoints, so `state_dict()` can be
exchanged with them. The file is a reference to compare other implementations with, and the
model that `tools/demo/train.py` trains. One process, no fused kernels, differentiable.

Layouts: latents [B, C, F, H, W]; t [B, F] on the 0..1000 scale; tokens run over (f, h, w);
keys and values [B, rows, heads, head_dim], keys normalised and rotated.
RoPE and the timestep sinusoid are computed in float64, the rest in the parameters' type.
"""

import json
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    dim: int
    ffn_dim: int
    freq_dim: int
    in_dim: int
    out_dim: int
    num_heads: int
    num_layers: int
    text_len: int
    text_dim: int
    patch_size: tuple = (1, 2, 2)
    eps: float = 1e-6

    @classmethod
    def read(cls, path):
        known = {f.name for f in fields(cls)}
        with open(path) as file:
            return cls(**{k: v for k, v in json.load(file).items() if k in known})


def sinusoid(dim, t):
    """[n] -> [n, dim] in float64: cosines, then sines."""
    half = dim // 2
    rate = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=t.device) / half)
    angle = t.double()[:, None] * rate
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def rope_angles(head_dim, start_frame, frames, height, width, device):
    """Angles [B or 1, tokens, head_dim / 2] in float64; `start_frame` is an int or [B].

    A head is cut into (t, h, w) parts, each with base 10000 over its own width. Only the
    time axis is moved by `start_frame`."""
    part = head_dim // 6
    start = torch.as_tensor(start_frame, device=device).reshape(-1, 1)
    position = [start + torch.arange(frames, device=device)]
    position += [torch.arange(n, device=device)[None] for n in (height, width)]
    angles = []
    for axis, size in enumerate((head_dim - 4 * part, 2 * part, 2 * part)):
        rate = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64, device=device) / size)
        angle = position[axis].double()[:, :, None] * rate
        shape = [angle.shape[0], 1, 1, 1, size // 2]
        shape[1 + axis] = angle.shape[1]
        angles.append(angle.reshape(shape).expand(start.shape[0], frames, height, width, -1))
    return torch.cat(angles, dim=-1).flatten(1, 3)


def rotate(x, angles):
    """Rotates the interleaved pairs of x [B, tokens, heads, head_dim], in the angles' type."""
    even, odd = x.to(angles.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
    pair = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return pair.flatten(-2).to(x.dtype)


def attend(q, k, v, bias=None):
    """Softmax attention over [B, rows, heads, head_dim]; `bias` [keys] or [B, keys] is added
    to the scores."""
    if bias is not None:
        bias = bias.to(q.dtype).reshape(-1, 1, 1, bias.shape[-1])
        bias = bias.expand(q.shape[0], q.shape[2], q.shape[1], -1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


class RMSNorm(nn.Module):
    """Over the whole width, that is across heads."""

    def __init__(self, dim, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (x.float() * scale).to(x.dtype) * self.weight.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(cfg.dim, cfg.dim) for _ in range(4))
        self.norm_q, self.norm_k = RMSNorm(cfg.dim, cfg.eps), RMSNorm(cfg.dim, cfg.eps)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1))

    def queries(self, x):
        return self.split(self.norm_q(self.q(x)))

    def keys(self, x):
        return self.split(self.norm_k(self.k(x)))

    def values(self, x):
        return self.split(self.v(x))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.eps = cfg.eps
        self.self_attn = Attention(cfg)
        self.cross_attn = Attention(cfg)
        self.norm3 = nn.LayerNorm(cfg.dim, cfg.eps)
        self.ffn = nn.Sequential(
            nn.Linear(cfg.dim, cfg.ffn_dim),
            nn.GELU(approximate="tanh"),
            nn.Linear(cfg.ffn_dim, cfg.dim),
        )
        self.modulation = nn.Parameter(torch.randn(1, 6, cfg.dim) / cfg.dim**0.5)

    def forward(self, x, e0, text, angles, kv, bias):
        """x [B, F, tokens per frame, dim]; e0 [B, F, 6, dim]. Returns x and this chunk's k, v."""
        frames = x.shape[1]
        e = (self.modulation[:, None] + e0)[:, :, :, None].unbind(2)
        shift_sa, scale_sa, gate_sa, shift_ff, scale_ff, gate_ff = e

        h = modulate(x, shift_sa, scale_sa, self.eps).flatten(1, 2)
        attn = self.self_attn
        q, k, v = rotate(attn.queries(h), angles), rotate(attn.keys(h), angles), attn.values(h)
        own = k, v
        if kv is not None:
            k, v = (torch.cat([past.to(new.dtype), new], dim=1) for past, new in zip(kv, own))
        y = attn.o(attend(q, k, v, bias).flatten(2))
        x = x + gate_sa * y.unflatten(1, (frames, -1))

        attn = self.cross_attn
        h = self.norm3(x).flatten(1, 2)
        y = attn.o(attend(attn.queries(h), attn.keys(text), attn.values(text)).flatten(2))
        x = x + y.unflatten(1, (frames, -1))

        x = x + gate_ff * self.ffn(modulate(x, shift_ff, scale_ff, self.eps))
        return x, own


def modulate(x, shift, scale, eps):
    return F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale) + shift


class Head(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        pt, ph, pw = cfg.patch_size
        self.eps = cfg.eps
        self.head = nn.Linear(cfg.dim, pt * ph * pw * cfg.out_dim)
        self.modulation = nn.Parameter(torch.randn(1, 2, cfg.dim) / cfg.dim**0.5)

    def forward(self, x, e):
        shift, scale = (self.modulation[:, None] + e[:, :, None])[:, :, :, None].unbind(2)
        return self.head(modulate(x, shift, scale, self.eps))


class Wan(nn.Module):
    # Training may lower this; a reference run must not.
    rope_dtype = torch.float64

    def __init__(self, cfg):
        super().__init__()
        assert tuple(cfg.patch_size) == (1, 2, 2)
        self.cfg = cfg
        self.patch_embedding = nn.Conv3d(cfg.in_dim, cfg.dim, cfg.patch_size, cfg.patch_size)
        self.text_embedding = nn.Sequential(
            nn.Linear(cfg.text_dim, cfg.dim),
            nn.GELU(approximate="tanh"),
            nn.Linear(cfg.dim, cfg.dim),
        )
        self.time_embedding = nn.Sequential(
            nn.Linear(cfg.freq_dim, cfg.dim), nn.SiLU(), nn.Linear(cfg.dim, cfg.dim)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(cfg.dim, 6 * cfg.dim))
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.num_layers))
        self.head = Head(cfg)

    def forward(self, x, t, text, start_frame=0, kv=None, bias=None):
        """x [B, C, F, H, W], t [B, F], text [B, len, text_dim] -> prediction [B, C, F, H, W]
        and per layer (k, v) of this chunk.

        kv: per layer (k, v) of the context, each [B, rows, heads, head_dim]. The chunk attends
        to those rows, then to its own, without a mask. bias: added to the scores, one value
        per key in that order, [keys] or [B, keys]."""
        height, width = x.shape[3] // 2, x.shape[4] // 2
        y, own = self.on_tokens(patchify(x), t, text, height, width, start_frame, kv, bias)
        return unpatchify(y, height, width), own

    def on_tokens(self, x, t, text, height, width, start_frame=0, kv=None, bias=None):
        """`forward` on patches [B, tokens, (p, q, C)]."""
        cfg, frames = self.cfg, t.shape[1]
        dtype = self.head.head.weight.dtype
        # A convolution whose stride is its kernel is a linear layer on each patch.
        weight = self.patch_embedding.weight.permute(0, 2, 3, 4, 1).flatten(1)
        x = F.linear(x, weight, self.patch_embedding.bias).unflatten(1, (frames, -1))

        e = self.time_embedding(sinusoid(cfg.freq_dim, t.flatten()).to(dtype))
        e0 = self.time_projection(e).reshape(*t.shape, 6, cfg.dim)
        e = e.reshape(*t.shape, cfg.dim)

        # Rows past the prompt are zeros before the embedding, and they are attended.
        text = F.pad(text, (0, 0, 0, cfg.text_len - text.shape[1]))
        text = self.text_embedding(text)

        head_dim = cfg.dim // cfg.num_heads
        angles = rope_angles(head_dim, start_frame, frames, height, width, x.device)
        angles = angles.to(self.rope_dtype)
        own = []
        for i, block in enumerate(self.blocks):
            x, new = block(x, e0, text, angles, kv[i] if kv else None, bias)
            own.append(new)
        return self.head(x, e).flatten(1, 2), own


def patchify(x):
    """[B, C, F, H, W] -> [B, (f h w), (p q C)]."""
    x = x.unflatten(4, (-1, 2)).unflatten(3, (-1, 2))
    return x.permute(0, 2, 3, 5, 4, 6, 1).flatten(4).flatten(1, 3)


def unpatchify(x, height, width):
    """[B, (f h w), (p q C)] -> [B, C, F, H, W]: the channel is the fastest of a token."""
    x = x.unflatten(2, (2, 2, -1)).unflatten(1, (-1, height, width))
    return x.permute(0, 6, 1, 2, 4, 3, 5).flatten(5).flatten(3, 4)


def sigmas(steps, shift=5.0, warp=True):
    """Noise levels of a step list; the timestep is 1000 times the level.

    The full table is linspace(1, 0, 1001)[:-1]; with `warp` a step s stands for the level
    that s / 1000 has after the shift: [1000, 750, 500, 250] -> 1, .9375, .8333, .625."""
    level = torch.tensor(steps, dtype=torch.float64) / 1000
    return shift * level / (1 + (shift - 1) * level) if warp else level


def denoise(model, noise, text, levels, prediction="x0", **context):
    """One chunk. `noise(i)` gives the standard normal draw of step i, [B, C, F, H, W]."""
    x0 = None
    for i, level in enumerate(levels.tolist()):
        draw = noise(i)
        x = level * draw if x0 is None else (1 - level) * x0 + level * draw
        t = torch.full((x.shape[0], x.shape[2]), 1000 * level, dtype=torch.float64, device=x.device)
        out, _ = model(x, t, text, **context)
        x0 = out if prediction == "x0" else (x.double() - level * out.double()).to(x.dtype)
    return x0


def clean_pass(model, latents, text, **context):
    """Keys and values of finished latents: one forward at t = 0."""
    t = torch.zeros(latents.shape[0], latents.shape[2], dtype=torch.float64, device=latents.device)
    return model(latents, t, text, **context)[1]


def stream_resident(model, texts, noise, levels, window_frames=6, prediction="x0"):
    """Yields the latents of one chunk per entry of `texts`; keys and values stay resident.

    The K/V rows of the denoise steps are thrown away. A last pass at t = 0 over the final
    latents, under the same context and prompt, gives the rows that later chunks attend to;
    the newest window_frames - chunk_frames frames of them are kept. Frame positions are
    absolute. `noise(chunk, step)` gives the draws."""
    kv, position = None, 0
    for chunk, text in enumerate(texts):
        context = dict(start_frame=position, kv=kv)
        z = denoise(model, lambda i: noise(chunk, i), text, levels, prediction, **context)
        own = clean_pass(model, z, text, **context)
        frames = z.shape[2]
        rows = (window_frames - frames) * (own[0][0].shape[1] // frames)
        if kv is not None:
            own = [tuple(torch.cat(pair, dim=1) for pair in zip(a, b)) for a, b in zip(kv, own)]
        kv = [tuple(x[:, x.shape[1] - min(rows, x.shape[1]):] for x in pair) for pair in own]
        kv = kv if rows else None
        position += frames
        yield z


def stream_recompute(model, texts, noise, levels, reencode, bias=1.0, prediction="x0"):
    """Yields the latents of one chunk per entry of `texts`; nothing but latents carries over.

    Chunk 0 has no context and positions 0.. . A later chunk first runs [anchor, z_-2, z_-1]
    at t = 0, positions 0..2, with its own prompt; it is then denoised at positions 3.. over
    those rows and its own. log(bias) is added to the scores of the keys of context frames 1
    and 2. The anchor of chunk 1 is latent 0 itself; later it is
    `reencode(latent 0 of the previous chunk)`: decode, take the last pixel frame, encode it
    alone."""
    z = None
    for chunk, text in enumerate(texts):
        context = {}
        if z is not None:
            anchor = z[:, :, :1] if chunk == 1 else reencode(z[:, :, :1])
            frames = torch.cat([anchor, z[:, :, -2:]], dim=2)
            kv = clean_pass(model, frames, text, start_frame=0)
            rows = kv[0][0].shape[1]
            context = dict(start_frame=3, kv=kv)
            if bias != 1.0:
                own = rows // 3 * z.shape[2]
                scores = torch.zeros(rows + own, dtype=torch.float64, device=z.device)
                scores[rows // 3 : rows] = torch.tensor(bias, dtype=torch.float64).log()
                context["bias"] = scores
        z = denoise(model, lambda i: noise(chunk, i), text, levels, prediction, **context)
        yield z


def space_time_decode(z):
    """Lossless decoder: latents [B, 768, F, H, W] -> pixels [B, 4F, 8H, 8W, 3], clamped to
    [-1, 1]. Channel c = ((dt * 8 + dy) * 8 + dx) * 3 + rgb."""
    z = z.unflatten(1, (4, 8, 8, 3)).permute(0, 5, 1, 6, 2, 7, 3, 4)
    return z.flatten(5, 6).flatten(3, 4).flatten(1, 2).clamp(-1, 1)


def space_time_encode(pixels):
    """The inverse: pixels [B, 4F, 8H, 8W, 3] -> latents [B, 768, F, H, W]."""
    x = pixels.unflatten(3, (-1, 8)).unflatten(2, (-1, 8)).unflatten(1, (-1, 4))
    return x.permute(0, 2, 4, 6, 7, 1, 3, 5).flatten(1, 4)


def space_time_anchor(z):
    """`reencode` of that decoder: the last pixel frame of one latent frame, four times."""
    frame = space_time_decode(z)[:, -1:]
    return space_time_encode(frame.expand(-1, 4, -1, -1, -1))
