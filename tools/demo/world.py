"""The synthetic clips: renders them, finds the valid clip nearest to given pixels, and measures the content of pixels.

models/demo/palette.json contains all parameters of a clip. The plane is a torus; an object keeps its position on it when the
prompt changes. Positions at the start of a chunk are multiples of 8 pixels, because an object moves 24 pixels in a chunk. Colours
are in [-1, 1].
"""

import json
from pathlib import Path

import torch

PALETTE = Path(__file__).resolve().parents[2] / "models/demo/palette.json"
COLORS = ["red", "green", "blue", "yellow"]
SHAPES = ["circle", "square", "triangle"]
DIRECTIONS = ["left", "right", "up", "down"]
PROMPTS = [
    f"a {c} {s} moves {d}" for c in COLORS for s in SHAPES for d in DIRECTIONS
]
GRID = 8


def attributes(prompts):
    """Returns the indices (colour, shape, direction) of prompt indices."""
    return prompts // 12, prompts // 4 % 3, prompts % 4


def coverage(shape, geometry, edge, x, y):
    """Returns the covered share of the pixel at (x, y) from the centre; the edge is a ramp `edge` pixels wide."""
    if shape == "circle":
        inside = geometry["radius"] - (x * x + y * y).sqrt()
    elif shape == "square":
        inside = geometry["half"] - torch.maximum(x.abs(), y.abs())
    else:
        top, bottom, half = geometry["top"], geometry["bottom"], geometry["half_base"]
        height = bottom - top
        slant = (half * (y - top) / height - x.abs()) * height / (height**2 + half**2) ** 0.5
        inside = torch.minimum(slant, bottom - y)
    return (inside / edge + 0.5).clamp(0, 1)


def tile(background):
    """Renders one 16 x 16 tile of a background, [16, 16, 3]."""
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    share = {
        "dots": (3.5 - ((x - 7.5) ** 2 + (y - 7.5) ** 2).sqrt()).clamp(0, 1),
        "diagonal": (((x + y) % 16) < 5).float(),
        "checks": ((x < 8) == (y < 8)).float(),
        "lines": ((y % 8) < 3).float(),
    }[background["pattern"]][:, :, None]
    base, accent = torch.tensor(background["base"]), torch.tensor(background["accent"])
    return (base + share * (accent - base)) / 127.5 - 1


class World:
    """The objects and backgrounds of the palette on a device."""

    def __init__(self, device="cpu"):
        spec = json.loads(PALETTE.read_text())
        size = self.size = spec["size"]
        self.device = device
        self.colors = torch.tensor([spec["colors"][c] for c in COLORS], device=device) / 127.5 - 1
        steps = [spec["directions"][d] for d in DIRECTIONS]
        self.steps = torch.tensor(steps, device=device) * spec["speed"]
        # The object's centre is at (0, 0), the corner of four pixels; coordinates wrap.
        axis = (torch.arange(size) + 0.5 + size / 2) % size - size / 2
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        self.masks = torch.stack(
            [coverage(s, spec["shapes"][s], spec["edge"], x, y) for s in SHAPES]
        ).to(device)
        tiles = torch.stack([tile(b) for b in spec["backgrounds"]])
        self.backgrounds = tiles.repeat(1, size // 16, size // 16, 1).to(device)
        # The masks at every grid position, as the columns of a matrix, for `nearest`.
        n = size // GRID
        shifted = [
            torch.roll(self.masks, (GRID * (i // n), GRID * (i % n)), (1, 2)) for i in range(n * n)
        ]
        self.shifted = torch.stack(shifted, dim=-1).flatten(1, 2)

    def centers(self, prompt, position, frames=12):
        """Returns the object centres (x, y) of each pixel frame, [B, frames, 2]; `position` is the centre in frame 0."""
        step = self.steps[attributes(prompt)[2]]
        n = torch.arange(frames, device=self.device)
        return (position[:, None] + step[:, None] * n[:, None]) % self.size

    def render(self, prompt, position, background, dtype=torch.float32):
        """Renders clips [B, 12, y, x, 3] from prompts [B], positions [B, 2] in pixels and backgrounds [B]."""
        color, shape, _ = attributes(prompt)
        center = self.centers(prompt, position)
        axis = torch.arange(self.size, device=self.device)
        x, y = ((axis - center[..., i, None]) % self.size for i in (0, 1))
        mask = self.masks.to(dtype)[shape[:, None, None, None], y[..., :, None], x[..., None, :]]
        ground = self.backgrounds.to(dtype)[background][:, None]
        paint = self.colors.to(dtype)[color][:, None, None, None]
        return torch.addcmul(ground, mask[..., None], paint - ground)

    def next_position(self, prompt, position):
        return (position + 12 * self.steps[attributes(prompt)[2]]) % self.size

    @torch.autocast("cuda", enabled=False)
    @torch.autocast("cpu", enabled=False)
    @torch.no_grad()
    def nearest(self, prompt, pixels):
        """Returns the position and the background of the valid clip of `prompt` nearest to `pixels`."""
        color, shape, direction = attributes(prompt)
        n = self.size // GRID
        frames = pixels[:, ::4].float()
        flat = frames.mean(1).flatten(1)
        ground = self.backgrounds.flatten(1)
        background = (ground.square().sum(1) - 2 * flat @ ground.T).argmin(1)
        paint = self.colors[color][:, None, None, None]
        gain = (frames - paint).square().sum(-1)
        gain -= (frames - self.backgrounds[background][:, None]).square().sum(-1)
        row = torch.arange(len(shape), device=self.device)[:, None, None]
        cost = 0
        for f in range(3):
            scores = torch.einsum("bi,sin->bsn", gain[:, f].flatten(1), self.shifted)
            scores = scores[row[:, 0, 0], shape].unflatten(1, (n, n))
            # In frame 4f the object is f grid steps further; shift the scores back to frame 0.
            back = f * self.steps[direction].sign()
            axis = torch.arange(n, device=self.device)
            iy, ix = ((axis + back[:, i, None]) % n for i in (1, 0))
            cost = cost + scores[row, iy[:, :, None], ix[:, None, :]]
        best = cost.flatten(1).argmin(1)
        return torch.stack([best % n, best // n], dim=1) * GRID, background

    def first_clip(self, noise_tokens):
        """Returns the position and background that the first draw of chunk 0, noise_tokens [B, 192, 3072], selects.

        The token of latent frame 0 whose noise has the largest mean contains the object. The background is the index of the
        largest of eight means: the noise of each row dy of the latent cells, averaged over the frame."""
        frame = noise_tokens[:, :64].float()
        token = frame.mean(2).argmax(1)
        rows = frame.unflatten(2, (4, 4, 8, 24)).mean((1, 2, 3, 5))
        position = torch.stack([token % 8, token // 8], dim=1) * 16 + 8
        return position, rows.argmax(1)


def to_tokens(pixels):
    """[B, 4F, y, x, 3] -> [B, (f h w), (p q dt dy dx rgb)], the patches of the model."""
    b, n, height, width, _ = pixels.shape
    x = pixels.reshape(b, n // 4, 4, height // 16, 2, 8, width // 16, 2, 8, 3)
    return x.permute(0, 1, 3, 6, 4, 7, 2, 5, 8, 9).reshape(b, n * height * width // 1024, 3072)


def to_pixels(tokens, height=128, width=128):
    h, w = height // 16, width // 16
    x = tokens.unflatten(2, (2, 2, 4, 8, 8, 3)).unflatten(1, (-1, h, w))
    return x.permute(0, 1, 6, 2, 4, 7, 3, 5, 8, 9).reshape(len(tokens), -1, height, width, 3)


def measure(world, pixels):
    """Measures pixels [B, 12, y, x, 3] with the palette alone. Returns a dict of the indices of colour, shape and direction, the
    mean step (x, y) in pixels per frame, and the overlap of the shape with its template."""
    spec = json.loads(PALETTE.read_text())
    grounds = [b[k] for b in spec["backgrounds"] for k in ("base", "accent")]
    palette = torch.cat([world.colors, torch.tensor(grounds, device=pixels.device) / 127.5 - 1])
    distance = torch.stack([(pixels - c).square().sum(-1) for c in palette])
    label = distance.argmin(0)
    count = torch.stack([(label == c).flatten(1).sum(1) for c in range(4)], dim=1)
    color = count.argmax(1)
    mask = (label == color[:, None, None, None]).float()

    # On a torus the angle of the mean phase gives the centroid.
    size = world.size
    phase = torch.exp(2j * torch.pi * torch.arange(size, device=pixels.device) / size)
    along = [(mask.sum(axis) * phase).sum(-1) for axis in (2, 3)]
    center = torch.stack([z.angle() * size / (2 * torch.pi) for z in along], dim=-1)
    step = (center[:, 1:] - center[:, :-1] + size / 2) % size - size / 2
    step = step.mean(1)
    direction = (step @ world.steps.float().T).argmax(1)

    inter = torch.fft.rfft2(mask[:, ::4])[:, :, None] * torch.fft.rfft2(world.masks.round()).conj()
    inter = torch.fft.irfft2(inter, s=(size, size)).flatten(3).amax(-1)
    area = mask[:, ::4].flatten(2).sum(-1)[:, :, None] + world.masks.round().flatten(1).sum(1)
    overlap, shape = (inter / (area - inter)).mean(1).max(1)
    return dict(color=color, shape=shape, direction=direction, step=step, overlap=overlap)
