"""Streams every prompt in both cache regimes, measures the content of the pixels, and prints the quality table."""

import argparse
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "pytorch")]
import wan  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from world import PROMPTS, World, attributes, measure  # noqa: E402

LEVELS = wan.sigmas([1000, 750, 500, 250])


def load(folder, device):
    folder = Path(folder)
    model = wan.Wan(wan.Config.read(folder / "config.json"))
    state = load_file(folder / "model.safetensors")
    model.load_state_dict({k: v.float() for k, v in state.items()})
    words = load_file(folder / "text_encoder.safetensors")["words.weight"].to(device)
    vocab = (folder / "vocab.txt").read_text().split()
    rows = torch.tensor([[vocab.index(w) for w in p.split()] for p in PROMPTS], device=device)
    return model.to(device).eval(), lambda prompt: words[rows[prompt]]


def stream(model, text, regime, prompts, seed, device):
    """Yields the pixels of one chunk per entry of `prompts`, each a [B] of prompt indices."""
    draws = torch.Generator(device).manual_seed(seed)
    batch = len(prompts[0])

    def noise(chunk, step):
        return torch.randn(batch, 768, 3, 16, 16, generator=draws, device=device)

    texts = (text(p) for p in prompts)
    if regime == "resident":
        chunks = wan.stream_resident(model, texts, noise, LEVELS)
    else:
        bias = 0.3 if regime == "recompute 0.3" else 1.0
        chunks = wan.stream_recompute(model, texts, noise, LEVELS, wan.space_time_anchor, bias)
    for z in chunks:
        yield wan.space_time_decode(z)


def check(world, pixels, prompt):
    """Returns for each stream whether it is right, its PSNR against the nearest valid clip, and that clip's position and
    background."""
    measured = measure(world, pixels)
    color, shape, direction = attributes(prompt)
    step = world.steps[direction].float()
    right = (measured["color"] == color) & (measured["shape"] == shape) & (measured["direction"] == direction)
    right &= (measured["step"] - step).abs().amax(1) < 0.25
    position, background = world.nearest(prompt, pixels)
    clip = world.render(prompt, position, background)
    psnr = 10 * torch.log10(4 / (pixels - clip).square().flatten(1).mean(1))
    return right, psnr, position, background


@torch.no_grad()
def evaluate(folder, device, chunks, seeds, report):
    world = World(device)
    model, text = load(folder, device)
    prompt = torch.arange(48, device=device).repeat(seeds)
    rows, failures = [], 0
    for regime in ("resident", "recompute", "recompute 0.3"):
        jumps = 0
        expected = None
        psnrs, rights = [], []
        for k, pixels in enumerate(stream(model, text, regime, [prompt] * chunks, 1, device)):
            right, psnr, position, background = check(world, pixels, prompt)
            if expected is not None:
                continuous = (position == expected[0]).all(1) & (background == expected[1])
                jumps += (~continuous).sum().item()
            expected = world.next_position(prompt, position), background
            rights.append(right)
            psnrs.append(psnr)
        right, psnr = torch.stack(rights), torch.stack(psnrs)
        failures += (~right).sum().item() + jumps
        for a, b in ((0, 1), (1, 4), (4, 50), (50, 200), (200, chunks)):
            if b <= chunks and a < b:
                r, q = right[a:b], psnr[a:b]
                name = f"{a}" if b == a + 1 else f"{a}-{b - 1}"
                rows.append((regime, name, 100 * r.float().mean(), q.mean(), q.min(), ""))
        rows[-1] = rows[-1][:-1] + (f"{jumps} jumps in {len(prompt) * (chunks - 1)} chunks",)

        # The prompt changes every fourth chunk; the first chunk with the new prompt is measured.
        shuffle = torch.Generator(device).manual_seed(7)
        sequence = [prompt]
        for k in range(1, 24):
            new = torch.randint(48, (len(prompt),), generator=shuffle, device=device)
            sequence.append(new if k % 4 == 0 else sequence[-1])
        first, expected, moved = [], None, 0
        for k, pixels in enumerate(stream(model, text, regime, sequence, 2, device)):
            right, psnr, position, background = check(world, pixels, sequence[k])
            if k and k % 4 == 0:
                first.append((right, psnr))
                continuous = (position == expected[0]).all(1) & (background == expected[1])
                moved += (~continuous).sum().item()
            expected = world.next_position(sequence[k], position), background
        right, psnr = (torch.stack(x) for x in zip(*first))
        failures += (~right).sum().item() + moved
        note = f"{moved} jumps in {right.numel()} switches"
        rows.append((regime, "switch", 100 * right.float().mean(), psnr.mean(), psnr.min(), note))
    lines = ["| cache | chunks | right | mean PSNR | worst PSNR | |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for regime, name, right, mean, worst, note in rows:
        values = f"{right:.2f} % | {mean:.1f} dB | {worst:.1f} dB"
        lines.append(f"| {regime} | {name} | {values} | {note} |")
    report("\n".join(lines))
    return failures


@torch.no_grad()
def sheet(folder, device, path):
    """Writes a contact sheet: each row is a stream and shows two frames of each of its chunks."""
    from PIL import Image

    model, text = load(folder, device)
    prompt = torch.tensor([0, 5, 14, 23, 25, 31, 42, 47], device=device)
    other = torch.tensor([31, 42, 47, 0, 5, 14, 23, 25], device=device)
    for regime in ("resident", "recompute"):
        frames = []
        for pixels in stream(model, text, regime, [prompt] * 4 + [other] * 4, 3, device):
            frames += [pixels[:, 0], pixels[:, 6]]
        image = torch.stack(frames, dim=1)
        image = torch.nn.functional.pad(image, (0, 0, 0, 4, 0, 4), value=1.0)
        b, n, h, w, _ = image.shape
        image = image.permute(0, 2, 1, 3, 4).reshape(b * h, n * w, 3)
        image = ((image + 1) * 127.5).round().byte().cpu().numpy()
        Image.fromarray(image).save(f"{path}-{regime}.png")


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("folder", nargs="?", default=str(HERE.parents[1] / "models/demo"), help="model folder")
    p.add_argument("--chunks", type=int, default=220, help="chunks per stream")
    p.add_argument("--seeds", type=int, default=4, help="streams per prompt")
    p.add_argument("--sheet", help="also write contact sheets, with this path prefix")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = p.parse_args()
    if args.sheet:
        sheet(args.folder, args.device, args.sheet)
    sys.exit(evaluate(args.folder, args.device, args.chunks, args.seeds, print) > 0)


if __name__ == "__main__":
    main()
