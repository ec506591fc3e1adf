"""The model of dit_gpu.py: one denoise forward of the video generator, with synthetic weights.

The file contains the sizes, the source of the weights, a fast forward for each strategy, and the same forward in float64,
computed by tools/pytorch/wan.py.

The fast forward is written for speed. The KV caches hold three context frames, and three frames are denoised. The elementwise and
norm functions are compiled. Their boundaries lie where a GEMM, a collective or attention separates them anyway; the last function
of a block also computes the input of the next block. The strategies over P GPUs are:

ulysses   Each rank has 1/P of every frame's tokens, and all weights. One all-to-all sends q, k and v straight into the cache, which
          stores q beside k and v, so nothing is unpacked. The rows of this chunk are ordered by (rank, frame, position in the
          frame); attention does not depend on the order of keys.
megatron  Each rank has all tokens, and 1/P of every weight's heads or columns. All-reduces add the sums of squares for the norms of
          q and k, which span all heads, and the results of both attention output projections and of the second FFN layer.
"""

import json
import re
import struct
import sys
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.attention
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools/pytorch"))
import wan

E4M3_MAX = 448.0


@dataclass(frozen=True)
class Sizes:
    dim: int = 5120
    ffn: int = 13824
    heads: int = 40
    layers: int = 40
    grid: tuple = (30, 52)
    text_len: int = 512
    freq: int = 256
    width: int = 64
    frames: int = 3
    eps: float = 1e-6

    @classmethod
    def for_picture(cls, size, layers=None, tiny=False):
        """Returns the sizes for a picture of `size` HxW pixels; a token covers 2 x 2 latents, and a latent 8 x 8 pixels."""
        height, width = (int(x) for x in size.split("x"))
        assert height % 16 == 0 and width % 16 == 0, f"{size}: height and width must be multiples of 16"
        sizes = cls(dim=160, ffn=384, heads=8, layers=2, text_len=24, freq=32) if tiny else cls()
        sizes = replace(sizes, grid=(height // 16, width // 16))
        return replace(sizes, layers=layers) if layers else sizes

    head_dim = property(lambda s: s.dim // s.heads)
    frame_tokens = property(lambda s: s.grid[0] * s.grid[1])
    tokens = property(lambda s: s.frames * s.frame_tokens)


class Source:
    """Draws every tensor on `device` from the seed and the tensor's name, so that all ranks get equal tensors in any order of
    calls."""

    def __init__(self, sizes, seed, device, dtype):
        self.sizes, self.seed, self.device, self.dtype = sizes, seed, device, dtype

    def draw(self, name, shape, std=1.0, mean=0.0):
        generator = torch.Generator(self.device).manual_seed((self.seed << 32) ^ zlib.crc32(name.encode()))
        x = torch.randn(shape, generator=generator, device=self.device)
        # Every value is exact in bf16, whatever the dtype of the tensor.
        return x.mul_(std).add_(mean).bfloat16().to(self.dtype)

    def weight(self, name, *shape):
        if name.endswith("modulation"):
            # The gates are as large as in trained models, so that an error in a branch shows in the result.
            return self.draw(name, shape, 0.3)
        if "norm" in name:
            return self.draw(name, shape, 0.1, 1.0 if name.endswith("weight") else 0.0)
        return self.draw(name, shape, 0.02)

    def linear(self, name, out, inner):
        return self.weight(f"{name}.weight", out, inner), self.weight(f"{name}.bias", out)

    def attention(self, i, which, rows):
        """Returns cached K and V [rows, heads, head_dim]; the keys stand for normalised and rotated ones."""
        shape = (rows, self.sizes.heads, self.sizes.head_dim)
        return tuple(self.draw(f"{which}.{i}.{n}", shape) for n in "kv")

    def inputs(self):
        """Returns the latent tokens in float32, one timestep per frame, and the noise level, which all frames share."""
        x = self.draw("x", (self.sizes.tokens, self.sizes.width)).float()
        t = torch.tensor([937.5, 833.25, 625.0], device=self.device)[: self.sizes.frames]
        return x, t, 0.9375


# Elementwise and norm functions, which torch.compile compiles. They compute in float32; x and the results of GEMMs have the dtype
# of the residual stream. With `quant` a function returns rows in e4m3 with one scale each instead.


def quantize_rows(y):
    scale = (y.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp_min(1e-12)
    return (y / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def cast_output(y, like, quant):
    return quantize_rows(y) if quant else y.to(like.dtype)


def expand_by_frame(m, column, n):
    """Expands a column of m [frames, columns, dim] to the n rows, which are ordered by frame."""
    return m[:, column, None].expand(-1, n // m.shape[0], -1).reshape(n, -1)


def norm_modulate(x, m, shift, scale, eps):
    y = F.layer_norm(x, x.shape[-1:], eps=eps)
    return y * (1 + expand_by_frame(m, scale, len(x))) + expand_by_frame(m, shift, len(x))


def first_norm(x, m, eps, quant):
    return cast_output(norm_modulate(x.float(), m, 0, 1, eps), x, quant)


def add_gated(x, y, bias, gate):
    y = y.float() if bias is None else y.float() + bias.float()
    return (x.float() + (y if gate is None else y * gate)).to(x.dtype)


def after_self_attention(x, y, bias, m, weight, norm_bias, eps, quant):
    x = add_gated(x, y, bias, expand_by_frame(m, 2, len(x)))
    c = F.layer_norm(x.float(), x.shape[-1:], weight.float(), norm_bias.float(), eps)
    return x, cast_output(c, x, quant)


def after_cross_attention(x, y, bias, m, eps, quant):
    x = add_gated(x, y, bias, None)
    return x, cast_output(norm_modulate(x.float(), m, 3, 4, eps), x, quant)


def after_ffn(x, y, bias, m, following, eps, quant):
    x = add_gated(x, y, bias, expand_by_frame(m, 5, len(x)))
    return x, cast_output(norm_modulate(x.float(), following, 0, 1, eps), x, quant)


def sum_squares(x, parts):
    """Returns the sums of squares [n, parts] of each of `parts` equal parts of the rows of x [n, ...], in float32."""
    return x.float().reshape(len(x), parts, -1).square().sum(-1)


def rms_norm(x, weight, total, width, eps):
    """RMS norm of x [n, ..., local width]; if x is a shard, `total` [n, ...] holds the sums of squares over all ranks."""
    x = x.float()
    mean = x.square().mean(-1) if total is None else total / width
    return x * torch.rsqrt(mean + eps)[..., None] * weight.float()


def apply_rope(x, rope):
    """Rotates the pairs of x [n, ..., head_dim]; rope [2, n, head_dim] holds cosines, and sines with the sign of their
    position."""
    cos, sin = (r.view(len(r), *[1] * (x.dim() - 2), -1) for r in rope)
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x * cos + swapped * sin


def norm_rope_qk_to_cache(qkv, weight, rope, total, keys, width, eps):
    """Returns q as a new tensor and writes k into rows of the cache [n, heads, head_dim]; qkv is [n, 3, local width]."""

    def norm_rope(i):
        # Separate calls for q and k: the compiler would write a shared intermediate to memory in float32.
        y = rms_norm(qkv[:, i], weight[i], None if total is None else total[:, i], width, eps)
        return apply_rope(y.unflatten(-1, keys.shape[1:]), rope).to(qkv.dtype)

    keys.copy_(norm_rope(1))
    return norm_rope(0)


def norm_rope_qk_to_send(qkv, weight, rope, send_part, eps):
    """Writes q and k into their part [n, 2, P, local heads * head_dim] of the send buffer; qkv is [n, 3, width]."""
    y = rms_norm(qkv[:, :2], weight, None, None, eps).unflatten(-1, (-1, rope.shape[-1]))
    y = apply_rope(y, rope).to(qkv.dtype)
    send_part.copy_(y.view(send_part.shape))


def copy_v_to_send(qkv, send_part):
    send_part.copy_(qkv[:, 2].view(len(qkv), len(send_part), -1).transpose(0, 1))


def norm_cross_q(q, weight, total, width, eps):
    return rms_norm(q, weight, None if total is None else total[:, 0], width, eps).to(q.dtype)


def gather_heads(o, quant):
    """Concatenates the heads of all ranks: [P, n, w] -> [n, P * w]."""
    y = o.transpose(0, 1).flatten(1)
    return quantize_rows(y.float()) if quant else y.contiguous()


def quantize(o):
    return quantize_rows(o.float())


def gelu(h, quant):
    return cast_output(F.gelu(h.float(), approximate="tanh"), h, quant)


def predict_x0(x, flow, sigma):
    return x - sigma * flow.float()


ROW_FUNCTIONS = (first_norm, after_self_attention, after_cross_attention, after_ffn, sum_squares, norm_rope_qk_to_cache,
                 norm_rope_qk_to_send, copy_v_to_send, norm_cross_q, gather_heads, quantize, gelu, predict_x0)


class Gemms:
    """Computes x · wᵀ + b by one of PyTorch's methods; `tune` selects the fastest method for each use.

    fused     addmm, with bias and GELU in cuBLASLt's epilogue
    bare      mm; the elementwise function that follows adds the bias, or applies GELU
    searched  torch.compile with max-autotune, whose candidates include Triton GEMMs"""

    def __init__(self, fp8, autotune, gelu_fn, device):
        self.fp8, self.autotune, self.gelu_fn = fp8, autotune, gelu_fn
        # Only cuBLASLt's epilogue applies the tanh form of GELU.
        self.choice = {"up": "fused" if device.type == "cuda" else "bare"}
        self.times = {}
        if autotune:
            compiled = dict(mode="max-autotune-no-cudagraphs", fullgraph=True, dynamic=False)
            self.searched = torch.compile(lambda x, w, b: F.linear(x, w, b), **compiled)
            self.searched_up = torch.compile(lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"), **compiled)

    def weight(self, w):
        """Returns the weight in the form that the GEMM reads: unchanged, or quantised to e4m3 by rows."""
        return quantize_rows(w.float()) if self.fp8 else w

    def __call__(self, use, x, w, b, into=None, method=None):
        """Returns (result, bias still to be added). Without b there is no bias, as for a partial sum of one rank."""
        if self.fp8:
            (x, sx), (w, sw) = x, w
            y = torch._scaled_mm(x, w.t(), scale_a=sx, scale_b=sw.t(), bias=b, out_dtype=torch.bfloat16, use_fast_accum=True)
            if use == "up":
                return self.gelu_fn(y, True), None
            return (y if into is None else into.copy_(y)), None
        method = method or self.choice.get(use, "fused")
        if use == "up":
            if method == "fused":
                return torch._addmm_activation(b, x, w.t(), use_gelu=True), None
            if method == "searched":
                return self.searched_up(x, w, b), None
            return self.gelu_fn(torch.addmm(b, x, w.t()), False), None
        if method == "searched":
            y = self.searched(x, w, b)
            return (y if into is None else into.copy_(y)), None
        if into is not None:
            return torch.addmm(b, x, w.t(), out=into), None
        if b is None or method == "bare":
            return torch.mm(x, w.t()), b
        return torch.addmm(b, x, w.t()), None

    def tune(self, uses, time_us):
        """Times the methods of each use. `uses` maps a name to (rows, [(w, b), ...], whether the result has a given
        destination)."""
        for use, (rows, weights, placed) in uses.items():
            w, b = weights[0]
            x = torch.randn(rows, w.shape[1], device=w.device).to(w.dtype)
            into = x.new_empty(rows, len(w)) if placed else None
            methods = ["fused"]
            if b is not None and (use == "up" or not placed):
                methods.append("bare")
            if self.autotune:
                methods.append("searched")
            if len(methods) == 1:
                continue
            self.times[use] = {method: time_us(lambda i: self(use, x, *weights[i % len(weights)], into, method)) for method in methods}
            self.choice[use] = min(self.times[use], key=self.times[use].get)


class Forward:
    """The forward on one rank. `run()` reads self.x and self.t and writes self.x0; the addresses are fixed, for graph replay.

    `cut` is the scope of torch.compile. "split" compiles each elementwise or norm function by itself; "block" compiles whole
    transformer blocks without a graph break, with functional collectives inside. With compiled=False nothing is compiled. `like`
    is a forward that differs only in the picture's size; its weights are shared."""

    def __init__(self, sizes, source, strategy, rank, ranks, cut="split", compiled=True, fp8=False, autotune=False, like=None):
        assert sizes.heads % ranks == 0 and sizes.ffn % ranks == 0 and sizes.frame_tokens % ranks == 0, \
            f"heads, FFN width and tokens of a frame must be divisible by {ranks}"
        assert not (fp8 and strategy == "megatron" and ranks > 1), "fp8 needs one GPU or ulysses"
        self.sizes, self.strategy, self.rank, self.ranks = sizes, strategy if ranks > 1 else "one", rank, ranks
        self.device, self.dtype, self.fp8 = source.device, source.dtype, fp8
        self.compiles_blocks = cut == "block"
        mode = "max-autotune-no-cudagraphs" if autotune and self.compiles_blocks else None
        compile_fn = lambda f: torch.compile(f, fullgraph=True, dynamic=False, mode=mode)
        for f in ROW_FUNCTIONS:
            setattr(self, f.__name__, compile_fn(f) if compiled and not self.compiles_blocks else f)
        self.gemms = Gemms(fp8, autotune and not self.compiles_blocks, self.gelu, self.device)
        if self.compiles_blocks:
            self.gemms.choice["up"] = "bare"
            self.group = dist.group.WORLD.group_name if ranks > 1 else None
        self.step = compile_fn(self.block) if compiled and self.compiles_blocks else self.block
        self.place_tensors(source, like)

    def shard(self, x, dim=0):
        """Returns this rank's shard of heads or columns under megatron, and the whole tensor otherwise."""
        return x.chunk(self.ranks, dim)[self.rank].contiguous() if self.strategy == "megatron" else x

    def place_tensors(self, source, like):
        s = self.sizes
        self.heads = s.heads // self.ranks
        here = self.heads * s.head_dim
        share = self.ranks if self.strategy == "ulysses" else 1
        self.rows = s.tokens // share
        order = torch.arange(s.tokens, device=self.device).view(s.frames, share, -1).transpose(0, 1).flatten(1)
        self.tokens = order[self.rank if share > 1 else 0]
        # The token of each of this chunk's cache rows.
        self.row_tokens = order.flatten()
        angles = wan.rope_angles(s.head_dim, s.frames, s.frames, *s.grid, self.device)[0][self.tokens]
        sign = torch.tensor([-1.0, 1.0], dtype=torch.float64, device=self.device).repeat(s.head_dim // 2)
        self.rope = torch.stack([angles.cos().repeat_interleave(2, 1), angles.sin().repeat_interleave(2, 1) * sign]).float()

        if like is None:
            self.place_weights(source)
        else:
            for name in ("patch", "time", "head", "head_table", "tables", "rates"):
                setattr(self, name, getattr(like, name))
            self.layers = [dict(layer) for layer in like.layers]
        self.send = None
        if self.strategy == "ulysses":
            self.send = torch.empty(self.ranks, self.rows, 3, here, dtype=self.dtype, device=self.device)
        local_heads = lambda x: x.chunk(self.ranks, 1)[self.rank].flatten(1)
        for i, layer in enumerate(self.layers):
            k, v = (local_heads(x) for x in source.attention(i, "context", s.tokens))
            # GEMMs and all-to-alls write into the cache [rows, (q, k, v), local width], so it has a column for q too.
            cache = torch.zeros(2 * s.tokens, 3, here, dtype=self.dtype, device=self.device)
            cache[: s.tokens, 1], cache[: s.tokens, 2] = k, v
            layer["cache"] = cache
            if self.strategy != "ulysses" or self.compiles_blocks:
                # RoPE reads both elements of a pair, so it cannot write its result in place.
                layer["keys"] = torch.zeros(2 * s.tokens, here, dtype=self.dtype, device=self.device)
                layer["keys"][: s.tokens] = k

        x, t, self.sigma = source.inputs()
        self.x, self.t = x[self.tokens].contiguous(), t
        self.x0 = torch.zeros_like(self.x)

    def place_weights(self, source):
        s, d, w = self.sizes, self.sizes.dim, source
        self.patch = w.linear("patch_embedding", d, s.width)
        self.time = [w.linear("time_embedding.0", d, s.freq), w.linear("time_embedding.2", d, d),
                     w.linear("time_projection.1", 6 * d, d)]
        self.head = w.linear("head.head", s.width, d)
        self.head_table = w.weight("head.modulation", 1, 2, d).float()
        self.tables = torch.cat([w.weight(f"blocks.{i}.modulation", 1, 6, d) for i in range(s.layers)])[:, None].float()
        half = s.freq // 2
        self.rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=self.device) / half)

        self.layers = []
        for i in range(s.layers):
            b, layer = f"blocks.{i}", {}

            def keep(use, weight, bias, layer=layer):
                layer[use] = (self.gemms.weight(weight.contiguous()), bias)

            qkv = [w.linear(f"{b}.self_attn.{n}", d, d) for n in "qkv"]
            keep("qkv", *(torch.cat([self.shard(x[j]) for x in qkv]) for j in (0, 1)))
            del qkv
            for use, name, inner in (("o", "self_attn.o", d), ("co", "cross_attn.o", d), ("down", "ffn.2", s.ffn)):
                weight, bias = w.linear(f"{b}.{name}", d, inner)
                keep(use, self.shard(weight, 1), bias)
            for use, name, width in (("cq", "cross_attn.q", d), ("up", "ffn.0", s.ffn)):
                keep(use, *(self.shard(x) for x in w.linear(f"{b}.{name}", width, d)))
            layer["qk_norm"] = torch.stack([self.shard(w.weight(f"{b}.self_attn.norm_{n}.weight", d)) for n in "qk"])
            layer["cq_norm"] = self.shard(w.weight(f"{b}.cross_attn.norm_q.weight", d))
            layer["norm3"] = (w.weight(f"{b}.norm3.weight", d), w.weight(f"{b}.norm3.bias", d))
            text = source.attention(i, "text", s.text_len)
            layer["text"] = tuple((x if self.strategy == "ulysses" else x.chunk(self.ranks, 1)[self.rank]).contiguous() for x in text)
            self.layers.append(layer)

    def reduce(self, x):
        if self.strategy != "megatron":
            return x
        if self.compiles_blocks:
            return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", self.group))
        dist.all_reduce(x)
        return x

    def all_to_all(self, x, into):
        """Sends x [P, ...], indexed by destination, and returns the result, indexed by source; writes it to `into` unless blocks
        are compiled whole."""
        if self.compiles_blocks:
            sizes = [1] * self.ranks
            return torch.ops._c10d_functional.wait_tensor(
                torch.ops._c10d_functional.all_to_all_single(x, sizes, sizes, self.group))
        dist.all_to_all_single(into, x)
        return into

    def attend(self, q, k, v):
        """Attention over q, k and v, each [rows, heads, head_dim]; returns [rows, heads * head_dim]."""
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)

    def self_attention(self, a, layer):
        """Returns the input of the output projection."""
        s, n = self.sizes, self.sizes.tokens
        split = lambda x: x.unflatten(-1, (-1, s.head_dim))
        cache, here = layer["cache"], self.heads * s.head_dim
        if self.strategy == "ulysses":
            qkv = self.gemms("qkv", a, *layer["qkv"])[0].view(-1, 3, s.dim)
            if self.compiles_blocks:
                y = rms_norm(qkv[:, :2], layer["qk_norm"], None, None, s.eps).unflatten(-1, (-1, s.head_dim))
                y = torch.cat([apply_rope(y, self.rope).flatten(2).to(qkv.dtype), qkv[:, 2:]], 1)
                y = y.view(-1, 3, self.ranks, here).permute(2, 0, 1, 3).contiguous()
                y = self.all_to_all(y, None).flatten(0, 1)
                layer["keys"][n:].copy_(y[:, 1])
                cache[n:, 2].copy_(y[:, 2])
                q, k = y[:, 0], layer["keys"]
            else:
                self.norm_rope_qk_to_send(qkv, layer["qk_norm"], self.rope, self.send[:, :, :2].permute(1, 2, 0, 3), s.eps)
                self.copy_v_to_send(qkv, self.send[:, :, 2])
                self.all_to_all(self.send, cache[n:].view(self.send.shape))
                q, k = cache[n:, 0], cache[:, 1]
            o = self.attend(split(q), split(k), split(cache[:, 2])).view(self.ranks, self.rows, here)
            return self.gather_heads(self.all_to_all(o, torch.empty_like(o)), self.fp8)
        if self.compiles_blocks:
            qkv = self.gemms("qkv", a, *layer["qkv"])[0].view(-1, 3, here)
            cache[n:, 2].copy_(qkv[:, 2])
        else:
            qkv = cache[n:]
            self.gemms("qkv", a, *layer["qkv"], into=qkv.view(n, 3 * here))
        total = self.reduce(self.sum_squares(qkv[:, :2], 2)) if self.strategy == "megatron" else None
        q = self.norm_rope_qk_to_cache(qkv, layer["qk_norm"], self.rope, total, split(layer["keys"][n:]), s.dim, s.eps)
        o = self.attend(q, split(layer["keys"]), split(cache[:, 2]))
        return self.quantize(o) if self.fp8 else o

    def cross_attention(self, c, layer):
        s = self.sizes
        q = self.gemms("cq", c, *layer["cq"])[0]
        total = self.reduce(self.sum_squares(q, 1)) if self.strategy == "megatron" else None
        q = self.norm_cross_q(q, layer["cq_norm"], total, s.dim, s.eps)
        o = self.attend(q.unflatten(-1, (-1, s.head_dim)), *layer["text"])
        return self.quantize(o) if self.fp8 else o

    def project_to_stream(self, use, x, layer):
        """Projects x back to the width of the residual stream; returns (result, bias still to be added)."""
        w, b = layer[use]
        if self.strategy == "megatron":
            return self.reduce(self.gemms(use, x, w, None)[0]), b
        return self.gemms(use, x, w, b)

    def block(self, x, a, m, following, layer):
        """Maps x [rows, dim] and its modulated form `a` to the same two after the block; `following` is the next layer's
        modulation."""
        eps, quant = self.sizes.eps, self.fp8
        y, b = self.project_to_stream("o", self.self_attention(a, layer), layer)
        x, c = self.after_self_attention(x, y, b, m, *layer["norm3"], eps, quant)
        y, b = self.project_to_stream("co", self.cross_attention(c, layer), layer)
        x, a = self.after_cross_attention(x, y, b, m, eps, quant)
        h = self.gemms("up", a, *layer["up"])[0]
        y, b = self.project_to_stream("down", h, layer)
        return self.after_ffn(x, y, b, m, following, eps, quant and following.shape[1] > 2)

    def run(self):
        s = self.sizes
        angle = self.t.double()[:, None] * self.rates
        h = torch.cat([angle.cos(), angle.sin()], 1).to(self.dtype)
        h = F.silu(F.linear(h, *self.time[0]))
        e = F.linear(h, *self.time[1])
        e0 = F.linear(F.silu(e), *self.time[2]).view(-1, 6, s.dim)
        m = self.tables + e0
        last = self.head_table + e[:, None]

        x = F.linear(self.x.to(self.dtype), *self.patch)
        a = self.first_norm(x, m[0], s.eps, self.fp8)
        for i, layer in enumerate(self.layers):
            x, a = self.step(x, a, m[i], m[i + 1] if i + 1 < s.layers else last, layer)
        self.x0.copy_(self.predict_x0(self.x, F.linear(a, *self.head), self.sigma))

    def new_kv_rows(self, i):
        """Returns this chunk's cached K and V, [rows, local width], in the order of `row_tokens`."""
        layer, n = self.layers[i], self.sizes.tokens
        return (layer["keys"][n:] if "keys" in layer else layer["cache"][n:, 1]), layer["cache"][n:, 2]

    def tune(self, time_us):
        placed = self.strategy != "ulysses"
        uses = {use: (self.rows, [l[use] for l in self.layers[:4]], placed and use == "qkv")
                for use in ("qkv", "o", "cq", "co", "up", "down")}
        if self.strategy == "megatron":
            uses |= {use: (rows, [(w, None) for w, _ in weights], placed)
                     for use, (rows, weights, placed) in uses.items() if use in ("o", "co", "down")}
        self.gemms.tune(uses, time_us)


def parameters(source):
    """Returns the tensors by Wan's names, without those of the text: the forward starts from cached text K and V."""
    s, d, tensors = source.sizes, source.sizes.dim, {}

    def linear(name, rows, inner):
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = source.linear(name, rows, inner)

    linear("patch_embedding", d, s.width)
    # A token is (row, column, channel); the kernel in the checkpoints is [dim, channel, 1, row, column].
    tensors["patch_embedding.weight"] = tensors["patch_embedding.weight"].view(d, 2, 2, -1).permute(0, 3, 1, 2)[:, :, None].contiguous()
    for name, rows, inner in (("time_embedding.0", d, s.freq), ("time_embedding.2", d, d), ("time_projection.1", 6 * d, d),
                              ("head.head", s.width, d)):
        linear(name, rows, inner)
    tensors["head.modulation"] = source.weight("head.modulation", 1, 2, d)
    for b in (f"blocks.{i}" for i in range(s.layers)):
        tensors[f"{b}.modulation"] = source.weight(f"{b}.modulation", 1, 6, d)
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "cross_attn.q", "cross_attn.o"):
            linear(f"{b}.{name}", d, d)
        for name in ("self_attn.norm_q", "self_attn.norm_k", "cross_attn.norm_q", "norm3"):
            tensors[f"{b}.{name}.weight"] = source.weight(f"{b}.{name}.weight", d)
        tensors[f"{b}.norm3.bias"] = source.weight(f"{b}.norm3.bias", d)
        linear(f"{b}.ffn.0", s.ffn, d)
        linear(f"{b}.ffn.2", d, s.ffn)
    return tensors


@torch.inference_mode()
def reference(source):
    """Computes x0 [tokens, width] and each layer's K and V [tokens, dim] of the chunk in float64 by wan.py."""
    s = source.sizes
    cfg = wan.Config(dim=s.dim, ffn_dim=s.ffn, freq_dim=s.freq, in_dim=s.width // 4, out_dim=s.width // 4, num_heads=s.heads,
                     num_layers=s.layers, text_len=s.text_len, text_dim=1, eps=s.eps)
    with torch.device("meta"):
        model = wan.Wan(cfg).double()
    missing, unknown = model.load_state_dict({k: v.double() for k, v in parameters(source).items()}, strict=False, assign=True)
    unused = ("text_embedding", "cross_attn.k", "cross_attn.v", "cross_attn.norm_k")
    assert not unknown and all(any(u in name for u in unused) for name in missing), (missing, unknown)
    model.text_embedding = torch.nn.Identity()
    caches = []
    for i, block in enumerate(model.blocks):
        k, v = (x.double()[None] for x in source.attention(i, "text", s.text_len))
        block.cross_attn.keys, block.cross_attn.values = (lambda _, k=k: k), (lambda _, v=v: v)
        caches.append(tuple(x.double()[None] for x in source.attention(i, "context", s.tokens)))
    x, t, sigma = source.inputs()
    x = x.double()[None]
    text = x.new_zeros(1, s.text_len, 1)
    # Override the attention backend that was selected for the fast forward.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        flow, own = model.on_tokens(x, t.double()[None], text, *s.grid, start_frame=s.frames, kv=caches)
    return (x - sigma * flow)[0], [tuple(y[0].flatten(1) for y in pair) for pair in own]


def relative_errors(forward, source):
    """Returns the relative errors (largest, root mean square) of x0 and of this chunk's K and V rows on this rank."""
    x0, own = reference(source)
    width = forward.heads * forward.sizes.head_dim
    local_columns = slice(forward.rank * width, (forward.rank + 1) * width)
    pairs = {"x0": [(forward.x0, x0[forward.tokens])], "k": [], "v": []}
    for i, rows in enumerate(own):
        for name, got, want in zip("kv", forward.new_kv_rows(i), rows):
            pairs[name].append((got, want[forward.row_tokens][:, local_columns]))
    worst = {}
    for name, results in pairs.items():
        each = [((got.double() - want), want) for got, want in results]
        worst[name] = [max((e.abs().max() / w.abs().max()).item() for e, w in each),
                       max((e.square().mean().sqrt() / w.square().mean().sqrt()).item() for e, w in each)]
    return worst


TYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16"}


def write_tensors(path, tensors):
    """Writes a safetensors file without the safetensors package."""
    header, offset = {}, 0
    for name, x in tensors.items():
        size = x.numel() * x.element_size()
        header[name] = {"dtype": TYPES[x.dtype], "shape": list(x.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for x in tensors.values():
            file.write(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def dump(folder, forward, source):
    """Writes a reference case for other implementations: weights by Wan's names, inputs, and x0 and K/V rows in float64."""
    folder.mkdir(parents=True, exist_ok=True)
    s, (x, t, sigma) = source.sizes, source.inputs()
    write_tensors(folder / "model.safetensors", {k: v.bfloat16() for k, v in parameters(source).items()})
    inputs = {"x": x, "t": t.float()}
    for which, rows in (("context", s.tokens), ("text", s.text_len)):
        for i in range(s.layers):
            for name, y in zip("kv", source.attention(i, which, rows)):
                inputs[f"{which}.{i}.{name}"] = y.flatten(1).bfloat16()
    write_tensors(folder / "inputs.safetensors", inputs)
    # A model folder in the form that `tessera bench dit --case` reads.
    model = Path(__file__).resolve().parents[2] / "models/wan2.1-14b"
    config = json.loads((model / "config.json").read_text()) | {"num_layers": s.layers}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    stream = re.sub(r"(?m)^width = .*$", f"width = {s.grid[1] * 16}", (model / "stream.toml").read_text())
    (folder / "stream.toml").write_text(re.sub(r"(?m)^height = .*$", f"height = {s.grid[0] * 16}", stream))
    x0, own = reference(source)
    expected = {"x0": x0} | {f"{n}.{i}": y for i, pair in enumerate(own) for n, y in zip("kv", pair)}
    write_tensors(folder / "expected.safetensors", expected)
    (folder / "case.json").write_text(json.dumps({
        "what": "one denoise forward: x0 = x - sigma * flow; k.i and v.i are this chunk's rows as cached (k after norm and rope)",
        "dim": s.dim, "ffn_dim": s.ffn, "num_heads": s.heads, "num_layers": s.layers, "freq_dim": s.freq, "eps": s.eps,
        "text_len": s.text_len, "in_dim": s.width // 4, "out_dim": s.width // 4, "patch_size": [1, 2, 2],
        "grid": [s.frames, *s.grid], "tokens": s.tokens, "context_rows": s.tokens, "start_frame": s.frames, "sigma": sigma,
        "t": t.tolist(), "seed": source.seed, "token": "(row, column, channel), channel fastest",
        "files": {"model": "BF16", "inputs": "x and t F32 (values of bf16), context.i and text.i BF16 [rows, dim]", "expected": "F64"},
        "pytorch_error": relative_errors(forward, source),
    }, indent=1) + "\n")
