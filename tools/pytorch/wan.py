"""The Wan2.1 causal video DiT in plain PyTorch, at any size.

The parameters have the names of the original Wan checkpoints, so both can exchange a `state_dict()`. The file is a reference for
other implementations, and the model that `tools/demo/train.py` trains. It runs in one process, uses no fused kernels, and is
differentiable.

Layouts: latents are [B, C, F, H, W], and t is [B, F] on the 0..1000 scale. Tokens are ordered by (f, h, w). Keys and values are
[B, rows, heads, head_dim]; the keys are normalised and rotated. RoPE and the timestep sinusoid are computed in float64, the rest
in the dtype of the parameters.
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
    """Returns the timestep sinusoid of t [n] as [n, dim] in float64: cosines, then sines."""
    half = dim // 2
    rate = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=t.device) / half)
    angle = t.double()[:, None] * rate
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def rope_angles(head_dim, start_frame, frames, height, width, device):
    """Returns the RoPE angles [B or 1, tokens, head_dim / 2] in float64; `start_frame` is an int or [B].

    A head is split into (t, h, w) parts, each with base 10000 over its own width. `start_frame` shifts only the time axis."""
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
    """Rotates the interleaved pairs of x [B, tokens, heads, head_dim], in the dtype of the angles."""
    even, odd = x.to(angles.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
    pair = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return pair.flatten(-2).to(x.dtype)


def attend(q, k, v, bias=None):
    """Softmax attention over [B, rows, heads, head_dim]; adds `bias` [keys] or [B, keys] to the scores."""
    if bias is not None:
        bias = bias.to(q.dtype).reshape(-1, 1, 1, bias.shape[-1])
        bias = bias.expand(q.shape[0], q.shape[2], q.shape[1], -1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


class RMSNorm(nn.Module):
    """RMS norm over the whole width, across heads."""

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
        """Applies the block to x [B, F, tokens per frame, dim] with e0 [B, F, 6, dim]; returns x and this chunk's k and v."""
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
    # Training may use a lower precision; a reference run must not.
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
        """Predicts from x [B, C, F, H, W], t [B, F] and text [B, len, text_dim].

        Returns the prediction [B, C, F, H, W] and this chunk's (k, v) of each layer. `kv` holds the context's (k, v) of each
        layer, each [B, rows, heads, head_dim]. The chunk attends to those rows and then to its own, without a mask. `bias`,
        [keys] or [B, keys], is added to the scores, one value per key in that order."""
        height, width = x.shape[3] // 2, x.shape[4] // 2
        y, own = self.on_tokens(patchify(x), t, text, height, width, start_frame, kv, bias)
        return unpatchify(y, height, width), own

    def on_tokens(self, x, t, text, height, width, start_frame=0, kv=None, bias=None):
        """Does the same as `forward` on patches [B, tokens, (p, q, C)]."""
        cfg, frames = self.cfg, t.shape[1]
        dtype = self.head.head.weight.dtype
        # A convolution whose stride equals its kernel size is a linear layer on each patch.
        weight = self.patch_embedding.weight.permute(0, 2, 3, 4, 1).flatten(1)
        x = F.linear(x, weight, self.patch_embedding.bias).unflatten(1, (frames, -1))

        e = self.time_embedding(sinusoid(cfg.freq_dim, t.flatten()).to(dtype))
        e0 = self.time_projection(e).reshape(*t.shape, 6, cfg.dim)
        e = e.reshape(*t.shape, cfg.dim)

        # Rows past the prompt are zero before the embedding; attention does not mask them.
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
    """[B, (f h w), (p q C)] -> [B, C, F, H, W]; the channel is the fastest index of a token."""
    x = x.unflatten(2, (2, 2, -1)).unflatten(1, (-1, height, width))
    return x.permute(0, 6, 1, 2, 4, 3, 5).flatten(5).flatten(3, 4)


def sigmas(steps, shift=5.0, warp=True):
    """Returns the noise levels of a step list; the timestep is 1000 times the level.

    The full table is linspace(1, 0, 1001)[:-1]. With `warp`, a step s stands for the level of s / 1000 after the shift:
    [1000, 750, 500, 250] -> 1, .9375, .8333, .625."""
    level = torch.tensor(steps, dtype=torch.float64) / 1000
    return shift * level / (1 + (shift - 1) * level) if warp else level


def denoise(model, noise, text, levels, prediction="x0", **context):
    """Denoises one chunk; `noise(i)` returns the standard normal draw of step i, [B, C, F, H, W]."""
    x0 = None
    for i, level in enumerate(levels.tolist()):
        draw = noise(i)
        x = level * draw if x0 is None else (1 - level) * x0 + level * draw
        t = torch.full((x.shape[0], x.shape[2]), 1000 * level, dtype=torch.float64, device=x.device)
        out, _ = model(x, t, text, **context)
        x0 = out if prediction == "x0" else (x.double() - level * out.double()).to(x.dtype)
    return x0


def clean_forward(model, latents, text, **context):
    """Returns the keys and values of finished latents from one forward at t = 0."""
    t = torch.zeros(latents.shape[0], latents.shape[2], dtype=torch.float64, device=latents.device)
    return model(latents, t, text, **context)[1]


def stream_resident(model, texts, noise, levels, window_frames=6, prediction="x0"):
    """Yields the latents of one chunk per entry of `texts`; keys and values stay resident.

    The K/V rows of the denoise steps are discarded. A last forward at t = 0 over the final latents, with the same context and
    prompt, computes the rows to which later chunks attend; the newest window_frames - chunk_frames frames of these rows are kept.
    Frame positions are absolute. `noise(chunk, step)` returns the draws."""
    kv, position = None, 0
    for chunk, text in enumerate(texts):
        context = dict(start_frame=position, kv=kv)
        z = denoise(model, lambda i: noise(chunk, i), text, levels, prediction, **context)
        own = clean_forward(model, z, text, **context)
        frames = z.shape[2]
        rows = (window_frames - frames) * (own[0][0].shape[1] // frames)
        if kv is not None:
            own = [tuple(torch.cat(pair, dim=1) for pair in zip(a, b)) for a, b in zip(kv, own)]
        kv = [tuple(x[:, x.shape[1] - min(rows, x.shape[1]):] for x in pair) for pair in own]
        kv = kv if rows else None
        position += frames
        yield z


def stream_recompute(model, texts, noise, levels, reencode, bias=1.0, prediction="x0"):
    """Yields the latents of one chunk per entry of `texts`; only latents pass from chunk to chunk.

    Chunk 0 has no context, and its positions start at 0. A later chunk first runs the context latents [anchor, z_-2, z_-1] at t =
    0 and positions 0..2, with its own prompt. It is then denoised at positions from 3 on, and attends to the context rows and its
    own. log(bias) is added to the scores of the keys of context frames 1 and 2. The anchor of chunk 1 is latent 0 itself. The
    anchor of a later chunk is `reencode(latent 0 of the previous chunk)`, which decodes the latent, takes the last pixel frame,
    and encodes that frame alone."""
    z = None
    for chunk, text in enumerate(texts):
        context = {}
        if z is not None:
            anchor = z[:, :, :1] if chunk == 1 else reencode(z[:, :, :1])
            frames = torch.cat([anchor, z[:, :, -2:]], dim=2)
            kv = clean_forward(model, frames, text, start_frame=0)
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
    """Decodes latents [B, 768, F, H, W] to pixels [B, 4F, 8H, 8W, 3] without loss and clamps them to [-1, 1].

    Channel c = ((dt * 8 + dy) * 8 + dx) * 3 + rgb."""
    z = z.unflatten(1, (4, 8, 8, 3)).permute(0, 5, 1, 6, 2, 7, 3, 4)
    return z.flatten(5, 6).flatten(3, 4).flatten(1, 2).clamp(-1, 1)


def space_time_encode(pixels):
    """Encodes pixels [B, 4F, 8H, 8W, 3] to latents [B, 768, F, H, W]; the inverse of `space_time_decode`."""
    x = pixels.unflatten(3, (-1, 8)).unflatten(2, (-1, 8)).unflatten(1, (-1, 4))
    return x.permute(0, 2, 4, 6, 7, 1, 3, 5).flatten(1, 4)


def space_time_anchor(z):
    """The `reencode` function of the space-time decoder: repeats the last pixel frame of one latent frame four times."""
    frame = space_time_decode(z)[:, -1:]
    return space_time_encode(frame.expand(-1, 4, -1, -1, -1))
