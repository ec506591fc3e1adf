// The rule by which frames are shown, without a browser. `cargo xtask page` runs it. The cases in play_out.json are those of `tessera-bench serve`, too,
// which plays by the same rule. With TESSERA_BLESS=1 the test writes what it computes into that file.

import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

import { PlayOut } from "./stream.js";

const CASES = join(import.meta.dirname, "play_out.json");
const FRAME_RATE = 24;
const CHUNK_FRAMES = 12;
const CHUNK_MS = 500;
const RESERVE_MS = 250;

/** Plays chunks that arrive at these times, and returns when each frame is shown. `isAwake` says when the page gets ticks. */
function play({ arrivals, endMs, tickMs = 4, isAwake = () => true, isPaused = () => false }) {
  const playOut = new PlayOut({ frameRate: FRAME_RATE, chunkFrames: CHUNK_FRAMES });
  const shown = [];
  let [waiting, skipped, chunk] = [0, 0, 0];
  for (let now = 0; now <= endMs; now += tickMs) {
    for (; chunk < arrivals.length && arrivals[chunk] <= now; chunk++) {
      for (let frame = 0; frame < CHUNK_FRAMES; frame++) {
        playOut.arrive(frame === 0, waiting, arrivals[chunk]);
        waiting += 1;
        if (waiting <= 3 * CHUNK_FRAMES) continue;
        playOut.drop(1, arrivals[chunk]);
        [waiting, skipped] = [waiting - 1, skipped + 1];
      }
    }
    if (!isAwake(now)) continue;
    playOut.expectsChunks = !isPaused(now);
    const taken = playOut.take(waiting, now);
    waiting -= taken.skipped + (taken.shows ? 1 : 0);
    skipped += taken.skipped;
    if (taken.shows) shown.push(now);
  }
  return { shown, skipped, stalls: playOut.stalls, interval: playOut.interval };
}

const arriveEvery = (ms, count, lateness = () => 0) => Array.from({ length: count }, (_, i) => 20 + i * ms + lateness(i));
const gaps = (times) => times.slice(1).map((time, i) => time - times[i]);

test("late and early chunks change no interval by more than one percent and a tick", () => {
  const arrivals = arriveEvery(CHUNK_MS, 120, (i) => [0, 180, -120, 90, -150, 40][i % 6] * (i > 0));
  const { shown, skipped, stalls } = play({ arrivals, endMs: 60_000 });
  assert.deepEqual([stalls, skipped], [0, 0]);
  assert.equal(shown[0], Math.ceil((20 + RESERVE_MS) / 4) * 4);
  const allowed = (1000 / FRAME_RATE) * 1.011 + 4;
  assert.ok(Math.max(...gaps(shown)) <= allowed, `${Math.max(...gaps(shown))}`);
  const rate = (1000 * (shown.length - 1)) / (shown.at(-1) - shown[0]);
  assert.ok(Math.abs(rate - FRAME_RATE) < 0.1, `${rate}`);
});

test("a clock that differs by half a percent is followed without a stall", () => {
  for (const period of [CHUNK_MS * 1.005, CHUNK_MS / 1.005]) {
    const { shown, skipped, stalls } = play({ arrivals: arriveEvery(period, 1200), endMs: 1190 * period });
    assert.deepEqual([stalls, skipped], [0, 0]);
    const late = shown.slice(-2400);
    const rate = (1000 * (late.length - 1)) / (late.at(-1) - late[0]);
    assert.ok(Math.abs(rate - (1000 * CHUNK_FRAMES) / period) < 0.02, `${rate}`);
  }
});

test("ranks that are slower than the video are followed evenly after two stalls, and until they are faster again", () => {
  const slow = arriveEvery(CHUNK_MS / 0.7, 60);
  const fast = arriveEvery(CHUNK_MS, 60).map((at) => at + slow.at(-1));
  const { shown, stalls } = play({ arrivals: [...slow, ...fast], endMs: fast.at(-1) });
  assert.equal(stalls, 2);
  const evenly = shown.filter((at) => at > 10_000 && at < slow.at(-1));
  assert.ok(Math.max(...gaps(evenly)) <= (1000 / FRAME_RATE / 0.7) * 1.011 + 4);
  const recent = gaps(shown.slice(-200));
  assert.ok(Math.max(...recent) <= 1000 / FRAME_RATE + 4);
});

test("a single late chunk stalls once, and the play goes on at the rate of the model", () => {
  const arrivals = arriveEvery(CHUNK_MS, 40, (i) => (i > 10 ? 1500 : 0));
  const { shown, stalls } = play({ arrivals, endMs: arrivals.at(-1) });
  assert.equal(stalls, 1);
  assert.ok(Math.max(...gaps(shown.slice(-240))) <= (1000 / FRAME_RATE) * 1.011 + 4);
});

test("chunks that come at once are shown at the rate of the model, without the oldest ones", () => {
  const arrivals = [...arriveEvery(CHUNK_MS, 8), 6000, 6010, 6020, 6030, ...arriveEvery(CHUNK_MS, 20).map((at) => at + 6500)];
  const { shown, skipped, stalls } = play({ arrivals, endMs: arrivals.at(-1) });
  assert.equal(stalls, 1);
  assert.ok(skipped >= 12 && skipped <= 24, `${skipped}`);
  assert.ok(Math.max(...gaps(shown.filter((at) => at > 6000))) <= 1000 / FRAME_RATE + 4);
});

test("a page that was hidden shows nothing old", () => {
  const arrivals = arriveEvery(CHUNK_MS, 60);
  const isAwake = (now) => now < 5_000 || now > 20_000;
  const { shown, skipped, stalls } = play({ arrivals, endMs: 29_000, isAwake });
  assert.equal(stalls, 0);
  assert.ok(skipped > 300 && skipped < 370, `${skipped}`);
  // Every frame counts, whether it was shown or not, so the play is as far as if the page had been seen.
  const expected = ((29_000 - 20 - RESERVE_MS) / 1000) * FRAME_RATE;
  assert.ok(Math.abs(shown.length + skipped - expected) < 4, `${shown.length + skipped} ${expected}`);
});

test("a pause is no stall", () => {
  const arrivals = [...arriveEvery(CHUNK_MS, 6), ...arriveEvery(CHUNK_MS, 6).map((at) => at + 9_000)];
  const { stalls } = play({ arrivals, endMs: 11_000, isPaused: (now) => now > 2_600 && now < 9_000 });
  assert.equal(stalls, 0);
});

test("the shared cases play as they are written", () => {
  const cases = JSON.parse(readFileSync(CASES));
  const played = cases.map((given) => {
    const { shown, skipped, stalls } = play(given);
    return { ...given, shown, skipped, stalls };
  });
  if (process.env.TESSERA_BLESS === "1") writeFileSync(CASES, `[\n${played.map((c) => JSON.stringify(c)).join(",\n")}\n]\n`);
  else assert.deepEqual(played, cases);
});
