"""Streams of video that are steered while they run, and texts that come piece by piece."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tessera import TesseraError
from tessera import runtime as rt

MODELS = Path(__file__).resolve().parents[3] / "models"
DEMO = MODELS / "demo"
TALES = MODELS / "tales"
FIRST, LATER = "a red circle moves right", "a blue square moves down"


def run_command(*arguments: str | Path) -> str:
    """Runs the command line of this package and returns what it prints."""
    command = [sys.executable, "-m", "tessera", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def collect(stream: rt.VideoStream) -> list[NDArray[np.uint8]]:
    """Takes all chunks, and checks that none is missing."""
    chunks = list(stream)
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    return [chunk.frames for chunk in chunks]


def assert_gone(pids: list[int]) -> None:
    assert pids
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists(), f"process {pid} is left"


def test_frames_equal_those_of_the_command_line(tmp_path: Path) -> None:
    with rt.stream(DEMO, prompt=FIRST, seed=5, chunks=3, mesh="tp=2", oversubscribe=True) as stream:
        chunks = collect(stream)
    raw = tmp_path / "frames.rgb"
    options = ["--chunks", "3", "--seed", "5", "--mesh", "tp=2", "--oversubscribe", "--quiet"]
    run_command("stream", DEMO, "--prompt", FIRST, *options, "--raw", raw, "--out", tmp_path / "run")
    frames = np.concatenate(chunks)
    assert frames.dtype == np.uint8 and frames.shape == (36, 128, 128, 3)
    assert frames.flags.c_contiguous and chunks[0].flags.writeable
    assert frames.tobytes() == raw.read_bytes()


def test_a_prompt_changes_later_frames_and_no_earlier_ones(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with rt.stream(DEMO, prompt=FIRST, chunks=16, out=out) as stream:
        frames = [next(stream).frames]
        change = stream.send(LATER)
        frames += [chunk.frames for chunk in stream]
        since = stream.chunk_of(change)
    assert since is not None and 0 < since < 16
    with rt.stream(DEMO, prompt=FIRST, chunks=16) as stream:
        plain = collect(stream)
    differs = [not np.array_equal(a, b) for a, b in zip(frames, plain, strict=True)]
    assert differs == [chunk >= since for chunk in range(16)]
    lines = [json.loads(line) for line in (out / "record.jsonl").read_text().splitlines()]
    prompts = [line["prompt"] for line in lines if "latents_digest" in line]
    assert prompts == [FIRST] * since + [LATER] * (16 - since)


def test_a_seed_and_a_cut_take_effect(tmp_path: Path) -> None:
    with rt.stream(DEMO, prompt=FIRST, seed=1, chunks=16, out=tmp_path / "run") as stream:
        next(stream)
        changes = [stream.reseed(8), stream.cut()]
        for _ in stream:
            pass
        seed, cut = (stream.chunk_of(change) for change in changes)
    lines = [json.loads(line) for line in (tmp_path / "run/record.jsonl").read_text().splitlines()]
    chunks = [line for line in lines if "latents_digest" in line]
    assert [line["seed"] for line in chunks].index(8) == seed
    assert [line["cut"] for line in chunks].index(True) == cut


def test_steps_and_weights_take_effect(tmp_path: Path) -> None:
    with rt.stream(DEMO, prompt=FIRST, chunks=16, out=tmp_path / "run") as stream:
        next(stream)
        changes = [stream.choose_steps("fast"), stream.set_lora(None)]
        with pytest.raises(TesseraError, match="default, fast"):
            stream.choose_steps("quarter")
        with pytest.raises(TesseraError, match="--cache recompute"):
            stream.set_bias(0.5)
        with pytest.raises(TesseraError, match="absent"):
            stream.set_lora(tmp_path / "absent.safetensors", strength=0.5)
        for _ in stream:
            pass
        steps, weights = (stream.chunk_of(change) for change in changes)
    lines = [json.loads(line) for line in (tmp_path / "run/record.jsonl").read_text().splitlines()]
    chunks = [line for line in lines if "latents_digest" in line]
    assert [line.get("step_list") for line in chunks].index("fast") == steps
    assert [line["cut"] for line in chunks].index(True) == weights


def test_changes_without_effect_are_refused() -> None:
    with rt.stream(DEMO, prompt=FIRST, chunks=2) as stream:
        with pytest.raises(TesseraError, match="purple"):
            stream.send("a purple elephant")
        with pytest.raises(TesseraError) as refused:
            stream.send("red " * 2000)
        assert refused.value.code == "T0093" and "4096" in str(refused.value)
        assert len(list(stream)) == 2
        with pytest.raises(TesseraError, match="no further change"):
            stream.cut()
    with pytest.raises(TesseraError, match="purple"):
        rt.stream(DEMO, prompt="a purple elephant")
    with pytest.raises(ValueError, match='"cpu" or "gpu"'):
        rt.stream(DEMO, device="tpu")


def test_leaving_or_dropping_a_stream_leaves_no_process() -> None:
    with rt.stream(DEMO) as stream:
        pids = stream.process_ids
        assert next(stream).frames.any()
    assert_gone(pids)
    with pytest.raises(StopIteration):
        next(stream)
    stream.close()
    with pytest.raises(ZeroDivisionError), rt.stream(DEMO) as stream:
        pids = stream.process_ids
        raise ZeroDivisionError
    assert_gone(pids)
    stream = rt.stream(DEMO)
    pids = stream.process_ids
    del stream
    assert_gone(pids)


def test_a_stream_that_waits_lets_other_threads_run() -> None:
    with rt.stream(DEMO) as stream:
        next(stream)
        sent = threading.Thread(target=lambda: stream.send(LATER))
        sent.start()
        next(stream)
        sent.join()


INTERRUPTED = """
    import sys
    from tessera import runtime as rt

    run = {run}
    try:
        print(*run.process_ids, flush=True)
        for _ in run:
            pass
        print("ended", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize(
    "run",
    [f"rt.stream({str(DEMO)!r})", f"rt.generate({str(TALES)!r}, 'The red circle', max_tokens=400)"],
    ids=["stream", "generate"],
)
def test_an_interrupt_ends_the_run_and_its_processes(run: str) -> None:
    script = textwrap.dedent(INTERRUPTED).format(run=run)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        # A rank that has stopped sends nothing, so the interrupt meets a wait and not the loop of the script.
        os.kill(pids[-1], signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGINT)
        ended = process.stdout.readline().strip()
        assert ended == "interrupted"
        # The interpreter is still there, so nothing but the interrupt has ended its ranks.
        assert_gone(pids)
        process.stdin.close()


def test_pieces_of_a_text_equal_the_text_of_the_command_line() -> None:
    with rt.generate(TALES, "The red circle", max_tokens=24) as run:
        with pytest.raises(RuntimeError, match="not ended"):
            run.text  # noqa: B018
        text = "".join(run)
        assert run.text == text and run.texts == [text]
    options = ["--prompt", "The red circle", "--max-tokens", "24"]
    assert run_command("generate", TALES, *options) == text + "\n"


def test_pieces_of_several_texts_name_their_text() -> None:
    prompts = ["The red circle", "A blue square", "The green triangle"]
    texts = [""] * len(prompts)
    with rt.generate(TALES, prompts, max_tokens=12) as run:
        for index, piece in run:
            texts[index] += piece
        assert run.texts == texts
        with pytest.raises(RuntimeError, match="several prompts"):
            run.text  # noqa: B018
    with rt.generate(TALES, prompts[1], max_tokens=12) as run_alone:
        assert "".join(run_alone) == texts[1]


def test_leaving_a_run_of_texts_leaves_no_process() -> None:
    with rt.generate(TALES, "The red circle", max_tokens=120) as run:
        pids = run.process_ids
        next(run)
    assert_gone(pids)
    with pytest.raises(TesseraError):
        rt.generate(DEMO, "The red circle")
    with pytest.raises(ValueError, match="at least one prompt"):
        rt.generate(TALES, [])
