// The page of `tessera serve` in a real browser. `cargo xtask page` runs it, with TESSERA the program, MODEL the demo model, FIXTURES the folder of fixtures,
// SCREENSHOTS a folder, CHROMIUM a browser if the machine has one, and PYTHON an interpreter with the packages websockets and numpy if it has one.

import assert from "node:assert/strict";
import { spawn, execFileSync } from "node:child_process";
import { copyFileSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";

import puppeteer from "puppeteer-core";

const { TESSERA, MODEL, FIXTURES, SCREENSHOTS, CHROMIUM } = process.env;
const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const PATIENCE = { timeout: 90_000 };

let server, address;

/** Starts a server. Returns its process and its address. */
function startServer(...args) {
  const started = spawn(TESSERA, ["serve", ...args, "--listen", "127.0.0.1:0", "--oversubscribe"]);
  return new Promise((resolve, reject) => {
    let text = "";
    started.stderr.on("data", (bytes) => {
      text += bytes;
      const found = text.match(/serving .* at (http:\S+)/);
      if (found) resolve([started, found[1]]);
    });
    started.on("exit", (code) => reject(new Error(`the server ended with ${code}: ${text}`)));
  });
}

async function stopServer(started) {
  started?.removeAllListeners("exit");
  const ended = new Promise((resolve) => started?.on("exit", resolve));
  started?.kill("SIGINT");
  assert.equal(await ended, 0);
}

async function startBrowser() {
  const args = ["--no-sandbox", "--disable-gpu", "--force-color-profile=srgb"];
  if (CHROMIUM) return puppeteer.launch({ executablePath: CHROMIUM, args });
  const { default: chromium } = await import("@sparticuz/chromium");
  return puppeteer.launch({ executablePath: await chromium.executablePath(), args: [...chromium.args, ...args] });
}

// A browser of the npm registry may lack libraries of the machine.
const browser = await startBrowser().catch((why) => {
  console.log(`SKIPPED: the page is not tested: no browser starts: ${why.message}`);
  process.exit(process.env.TESSERA_REQUIRE_PAGE === "1" ? 1 : 0);
});

/** Opens the page and collects what a developer would see as an error. */
async function openPage(path = "", { width = 1280, height = 1180, scheme = "light" } = {}) {
  const page = await browser.newPage();
  page.problems = [];
  page.on("console", (message) => ["error", "warn"].includes(message.type()) && page.problems.push(message.text()));
  page.on("pageerror", (error) => page.problems.push(String(error)));
  page.on("request", (request) => request.url().startsWith(address) || /^(blob|data):/.test(request.url()) || page.problems.push(request.url()));
  await page.setViewport({ width, height });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
  await page.goto(address + path);
  await page.waitForFunction(() => window.tessera?.latest, PATIENCE);
  return page;
}

const shoot = (page, name) => page.screenshot({ path: join(SCREENSHOTS, `${name}.png`), fullPage: true });

/** Returns the mean red, green and blue of the picture. */
const meanColor = (page) =>
  page.evaluate(() => {
    const { width, height } = document.getElementById("video");
    const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(document.getElementById("video"), 0, 0);
    const { data } = copy.getImageData(0, 0, width, height);
    const sum = [0, 0, 0];
    for (let i = 0; i < data.length; i += 4) for (let c = 0; c < 3; c++) sum[c] += data[i + c];
    return sum.map((s) => (4 * s) / data.length);
  });

/** Fails for what disables somebody. */
async function checkAccessibility(page) {
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => axe.run());
  const serious = violations.filter((v) => ["serious", "critical"].includes(v.impact));
  assert.deepEqual(serious.map((v) => [v.id, v.nodes.map((n) => n.html)]), []);
}

before(async () => {
  mkdirSync(SCREENSHOTS, { recursive: true });
  [server, address] = await startServer(MODEL, "--mesh", "tp=2");
}, PATIENCE);

afterEach(async () => {
  // A page frees the control, so that the next one has it.
  for (const page of await browser.pages()) {
    await page.evaluate(() => window.tessera?.stream.close());
    await page.close();
  }
});

after(async () => {
  await browser.close();
  await stopServer(server);
});

test("a prompt changes the picture, and the page says from which chunk", async () => {
  const page = await openPage();
  const [red, , blue] = await meanColor(page);
  await page.keyboard.press("/");
  await page.keyboard.type("a blue square moves left");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => /holds from chunk \d+/.test(document.getElementById("answer").textContent), PATIENCE);
  await page.waitForFunction(() => /\d/.test(document.getElementById("latency").textContent), PATIENCE);
  const [redder, , bluer] = await meanColor(page);
  assert.ok(bluer - redder > blue - red + 2, `${[red, blue, redder, bluer]}`);
  assert.match(await page.$eval("#shown", (e) => e.textContent), /blue square/);
  await page.waitForSelector("#timeline svg", PATIENCE);
  await page.waitForFunction(() => window.tessera.status.chunks > 8, PATIENCE);
  await checkAccessibility(page);
  await shoot(page, "light");
  assert.deepEqual(page.problems, []);
});

test("markup in a prompt stays text", async () => {
  const page = await openPage();
  await page.type("#prompt", "<img src=x onerror=alert(1)>");
  await page.click("#send");
  await page.waitForFunction(() => document.getElementById("answer").dataset.kind === "bad", PATIENCE);
  assert.match(await page.$eval("#answer", (e) => e.textContent), /<img/);
  assert.equal(await page.$("main img"), null);
  assert.deepEqual(page.problems, []);
});

test("another list of denoise steps shows in the phases", async () => {
  const page = await openPage();
  const steps = (count) => page.waitForFunction((text) => document.getElementById("phases").textContent.includes(text), PATIENCE, `denoise × ${count}`);
  await steps(4);
  await page.select("#steps", "fast");
  await steps(2);
  await page.select("#steps", "default");
  await steps(4);
  // The server was started without LoRAs, and the demo keeps its context, so that there is no bias.
  assert.equal(await page.$eval("#lora", (e) => e.parentElement.hidden), true);
  assert.equal(await page.$eval("#bias", (e) => e.parentElement.hidden), true);
  assert.deepEqual(page.problems, []);
});

test("the stream pauses and resumes by keyboard", async () => {
  const page = await openPage();
  await page.click("h2");
  await page.keyboard.press("Space");
  await page.waitForFunction(() => document.getElementById("state").textContent === "paused", PATIENCE);
  assert.equal(await page.$eval("#pause", (e) => e.textContent), "Resume");
  await page.keyboard.press("Space");
  await page.waitForFunction(() => document.getElementById("state").textContent === "running", PATIENCE);
  assert.deepEqual(page.problems, []);
});

test("frames that a flush discards are replaced", async () => {
  const page = await openPage();
  // More discarded frames than the credits with which the page begins.
  for (let flush = 0; flush < 8; flush++) {
    await page.click("#flush");
    await page.waitForFunction(() => /Flush holds from chunk/.test(document.getElementById("answer").textContent), PATIENCE);
    const from = await page.evaluate(() => window.tessera.status.chunks);
    await page.waitForFunction((chunks) => window.tessera.status.chunks > chunks, PATIENCE, from);
  }
  const shown = await page.evaluate(() => window.tessera.latest.frame);
  await page.waitForFunction((frame) => window.tessera.latest.frame > frame + 60, PATIENCE, shown);
  assert.deepEqual(page.problems, []);
});

test("a second page of the same viewer becomes a viewer of its own", async () => {
  const first = await openPage();
  const secret = await first.evaluate(() => sessionStorage.getItem("resume"));
  const copy = await browser.newPage();
  // A browser copies the storage of a tab that a person duplicates.
  await copy.evaluateOnNewDocument((resume) => sessionStorage.getItem("resume") ?? sessionStorage.setItem("resume", resume), secret);
  await copy.goto(address);
  await copy.waitForFunction(() => window.tessera?.latest, PATIENCE);
  await first.bringToFront();
  await first.waitForFunction((old) => ![null, old].includes(sessionStorage.getItem("resume")), PATIENCE, secret);
  assert.match(await first.$eval("#state", (e) => e.textContent), /running/);
  assert.equal(await copy.evaluate(() => sessionStorage.getItem("resume")), secret);
});

test("a second viewer watches, and gets the control when the first hands it over", async () => {
  const first = await openPage();
  const second = await openPage("", { width: 390, height: 844, scheme: "dark" });
  assert.match(await second.$eval("#control", (e) => e.textContent), /controls the stream. You are viewer \d+ and watch/);
  assert.ok(await second.$eval("#send", (e) => e.disabled));
  await second.click("#take");
  // A browser draws and runs only the page in front.
  await first.bringToFront();
  await first.waitForSelector("#give:not([hidden])", PATIENCE);
  await first.click("#give");
  await second.bringToFront();
  await second.waitForFunction(() => !document.getElementById("send").disabled, PATIENCE);
  await second.waitForSelector("#timeline svg", PATIENCE);
  await checkAccessibility(second);
  await shoot(second, "phone-dark");
  await second.click("#take");
  await first.bringToFront();
  await first.waitForFunction(() => /Nobody controls/.test(document.getElementById("control").textContent), PATIENCE);
  assert.deepEqual([...first.problems, ...second.problems], []);
});

test("recordings and snapshots can be downloaded", async () => {
  const page = await openPage("?format=jpeg");
  await page.click("#snapshot");
  await page.waitForSelector("#downloads a[download$='.png']", PATIENCE);
  await page.click("#lossless");
  await page.waitForSelector("#recording:not([hidden])", PATIENCE);
  const from = await page.evaluate(() => window.tessera.status.chunks);
  await page.waitForFunction((chunks) => window.tessera.status.chunks > chunks + 2, PATIENCE, from);
  await page.click("#lossless");
  const href = await page.waitForSelector("#downloads a[download$='.y4m']", PATIENCE).then((a) => a.evaluate((e) => e.href));
  const head = await page.evaluate(async (url) => (await (await fetch(url)).text()).slice(0, 24), href);
  assert.match(head, /^YUV4MPEG2 W128 H128/);
  assert.deepEqual(page.problems, []);
});

test("a browser plays chunks as MP4", async (t) => {
  const { stream } = await (await fetch(`${address}api/v1/status`)).json();
  if (!stream.mp4_type) {
    // `cargo xtask mp4` builds the encoder.
    assert.notEqual(process.env.MP4, "1");
    return t.skip("the program was built without the feature h264");
  }
  const page = await openPage();
  const played = await page.evaluate(async (type) => {
    if (!MediaSource.isTypeSupported(type)) return null;
    const { TesseraStream } = await import("/stream.js");
    const wait = async (holds) => {
      while (!holds()) await new Promise((resolve) => setTimeout(resolve, 20));
    };
    const [video, source, parts] = [document.createElement("video"), new MediaSource(), []];
    video.muted = true;
    video.src = URL.createObjectURL(source);
    await wait(() => source.readyState === "open");
    const buffer = source.addSourceBuffer(type);
    const append = () => buffer.updating || parts.length === 0 || buffer.appendBuffer(parts.shift());
    buffer.onupdateend = append;
    const stream = new TesseraStream(new URL("/socket", location.href.replace(/^http/, "ws")).href, { format: "mp4", credits: 4 });
    stream.addEventListener("frame", ({ detail }) => {
      parts.push(detail.picture);
      append();
      if (!detail.isInitialisation) stream.grant(1);
    });
    await wait(() => buffer.buffered.length > 0);
    const first = buffer.buffered.start(0);
    video.currentTime = first;
    await video.play();
    await wait(() => video.error || video.currentTime > first + 1);
    stream.close();
    const { width, height } = document.getElementById("video");
    const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(video, 0, 0);
    const { data } = copy.getImageData(0, 0, width, height);
    const mean = [0, 1, 2].map((c) => data.filter((_, i) => i % 4 === c).reduce((sum, value) => sum + value, 0) / (width * height));
    return { size: [video.videoWidth, video.videoHeight], error: video.error?.message ?? null, frames: buffer.buffered.length, mean };
  }, stream.mp4_type);
  if (!played) return t.skip("this browser plays no H.264");
  assert.deepEqual([played.size, played.error, played.frames], [[128, 128], null, 1]);
  const expected = await meanColor(page);
  assert.ok(played.mean.every((value, c) => Math.abs(value - expected[c]) < 16), `${played.mean} ${expected}`);
  assert.deepEqual(page.problems, []);
});

test("the client of the examples changes the prompt", async () => {
  const watch = join(import.meta.dirname, "watch.mjs");
  const output = execFileSync(process.execPath, [watch, address.replace("http", "ws") + "socket", "a green triangle moves up"], PATIENCE);
  assert.match(String(output), /chunk \d+ is complete/);
});

// Without the variable, `cargo xtask page` has said why.
const skip = process.env.PYTHON ? false : "PYTHON names no interpreter with websockets and numpy";

test("the client of the examples in Python writes frames", { skip }, () => {
  const folder = mkdtempSync(join(tmpdir(), "tessera-watch-"));
  try {
    const watch = join(import.meta.dirname, "watch.py");
    const output = execFileSync(process.env.PYTHON, [watch, address.replace("http", "ws") + "socket", "a yellow circle moves down", folder], PATIENCE);
    assert.match(String(output), /controls: True\nthe prompt holds from chunk \d+/);
    const pictures = readdirSync(folder);
    assert.ok(pictures.length >= 13, `${pictures.length} pictures`);
    for (const name of pictures) {
      const bytes = readFileSync(join(folder, name));
      assert.deepEqual([bytes[0], bytes[1], bytes.at(-2), bytes.at(-1)], [0xff, 0xd8, 0xff, 0xd9], name);
    }
  } finally {
    rmSync(folder, { recursive: true });
  }
});

/** Makes a model that takes an input video: the fixture of a generator and that of a causal VAE. */
function makeVideoModel(folder) {
  mkdirSync(join(folder, "vae"));
  for (const file of ["config.json", "model.safetensors", "vocab.txt", "text_encoder.safetensors"]) copyFileSync(join(FIXTURES, "wan-odd", file), join(folder, file));
  for (const file of ["config.json", "diffusion_pytorch_model.safetensors"]) copyFileSync(join(FIXTURES, "wan-vae/vae", file), join(folder, "vae", file));
  const settings = String(readFileSync(join(FIXTURES, "wan-odd/stream.toml")));
  writeFileSync(join(folder, "stream.toml"), settings.replace('kind = "none"', 'kind = "wan_vae"'));
}

test("the client of the examples sends a video, and chunks are generated from it", { skip }, async () => {
  const folder = mkdtempSync(join(tmpdir(), "tessera-video-"));
  let videoServer;
  try {
    makeVideoModel(folder);
    let at;
    [videoServer, at] = await startServer(folder, "--mesh", "tp=1", "--video-in", "--video-strength", "0.95", "--prompt", "a red square", "--pace", "free");
    const status = async () => (await fetch(new URL("api/v1/status", at))).json();
    const { width, height, video_in, chunk_frames } = (await status()).stream;
    const send = (...args) => {
      const client = [join(import.meta.dirname, "send_video.py"), at.replace("http", "ws") + "socket", ...args];
      const lines = String(execFileSync(process.env.PYTHON, client, PATIENCE)).trim().split("\n");
      return lines.map((line) => line.match(/^chunk (\d+) of epoch (\d+) was generated; (\d+) frames were taken$/).slice(1).map(Number));
    };
    const pattern = send("3");
    assert.deepEqual(pattern.map(([chunk]) => chunk), [1, 2, 3]);
    // Frames of the next chunks may have been taken before a chunk is complete.
    const needed = (chunk) => video_in.first_chunk_frames + (chunk - 1) * chunk_frames;
    for (const [chunk, , taken] of pattern) assert.ok(taken >= needed(chunk), `${taken} frames for ${chunk} chunks`);
    const first = await status();
    assert.ok(first.status.chunks >= 3 && first.status.frames >= needed(3), JSON.stringify(first.status));
    // The frames of the next client begin a scene, after the chunks whose frames were taken before.
    const frames = join(folder, "frames.npy");
    execFileSync(process.env.PYTHON, ["-c", `import numpy; numpy.save(r"${frames}", numpy.random.default_rng(1).integers(0, 256, (5, ${height}, ${width}, 3), numpy.uint8))`]);
    const noise = send("8", frames);
    assert.ok(noise.at(-1)[1] > pattern.at(-1)[1], `${noise} ${pattern}`);
    assert.ok(noise.at(-1)[2] >= needed(3), `${noise}`);
    assert.ok((await status()).status.chunks >= first.status.chunks + 8);
  } finally {
    if (videoServer) await stopServer(videoServer);
    rmSync(folder, { recursive: true });
  }
});

test("a killed rank shows its code, and the stream starts again", async () => {
  const page = await openPage("", { scheme: "dark" });
  const ranks = execFileSync("ps", ["-o", "pid=", "--ppid", String(server.pid)]).toString().split("\n").map(Number).filter(Boolean);
  assert.equal(ranks.length, 2);
  process.kill(Math.max(...ranks), "SIGKILL");
  await page.waitForSelector(".alarm .title", PATIENCE);
  assert.match(await page.$eval(".alarm .title", (e) => e.textContent), /^T\d{4}: /);
  await shoot(page, "alarm-dark");
  await page.waitForFunction(() => window.tessera.latest?.run === 2 && window.tessera.status.state === "running", PATIENCE);
  await checkAccessibility(page);
  assert.deepEqual(page.problems, []);
});
