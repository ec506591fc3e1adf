// The page of `tessera serve`.

import { Player, TesseraStream } from "./stream.js";

const element = (id) => document.getElementById(id);
const canvas = element("video");
const painter = canvas.getContext("2d");
/** Frames up to so many bytes per second come as they are; larger ones as JPEG. */
const RAW_BYTES_PER_SECOND = 6e6;
const COLORS = 9;

let facts = null;
let player = null;
let status = null;
let inControl = false;
let client = 0;
let wanted = 0;
let latest = null;
let usedUp = 0;
const sent = new Map();
const colors = new Map();
const history = JSON.parse(sessionStorage.getItem("prompts") ?? "[]");

const about = await (await fetch("api/v1/status")).json();
const bytesPerSecond = about.stream.width * about.stream.height * 3 * about.stream.frame_rate;
const format = new URLSearchParams(location.search).get("format") ?? (bytesPerSecond < RAW_BYTES_PER_SECOND ? "raw" : "jpeg");
const scheme = location.protocol === "https:" ? "wss" : "ws";
const stream = new TesseraStream(`${scheme}://${location.host}/socket`, {
  format,
  control: true,
  credits: 3 * about.stream.chunk_frames,
  // A page that is loaded again is the same viewer.
  resume: sessionStorage.getItem("resume"),
});

/** Makes an element with text and children. Texts are never read as markup. */
function make(name, text = "", attributes = {}, ...children) {
  const made = document.createElement(name);
  made.textContent = text;
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  made.append(...children);
  return made;
}

/** The kind of a phase is the part of its name before the first dot. */
const kindOf = (phase) => phase.split(".")[0];

function colorOf(phase) {
  const kind = kindOf(phase);
  if (!colors.has(kind)) colors.set(kind, `var(--p${colors.size % COLORS})`);
  return colors.get(kind);
}

function setNumber(id, value, unit = "") {
  element(id).replaceChildren(value, ...(unit ? [make("small", unit)] : []));
}

function seconds(ms) {
  return ms < 1000 ? [ms.toFixed(0), "ms"] : [(ms / 1000).toFixed(2), "s"];
}

function say(text, kind = "") {
  element("answer").textContent = text;
  element("answer").dataset.kind = kind;
}

// ---- frames ------------------------------------------------------------------------------------------------------

async function decode(frame) {
  if (frame.format === "jpeg") return createImageBitmap(new Blob([frame.picture], { type: "image/jpeg" }));
  const { width, height, picture } = frame;
  const pixels = new Uint8ClampedArray(width * height * 4);
  for (let from = 0, to = 0; from < picture.length; from += 3, to += 4) {
    pixels[to] = picture[from];
    pixels[to + 1] = picture[from + 1];
    pixels[to + 2] = picture[from + 2];
    pixels[to + 3] = 255;
  }
  return new ImageData(pixels, width, height);
}

/** Grants credits for frames that were shown or discarded, half a chunk at a time. */
function replace(frames) {
  usedUp += frames;
  if (usedUp < facts.chunk_frames / 2) return;
  stream.grant(usedUp);
  usedUp = 0;
}

async function show(frame, now) {
  const picture = await frame.decoded;
  if (picture instanceof ImageData) painter.putImageData(picture, 0, 0);
  else painter.drawImage(picture, 0, 0);
  latest = frame;
  replace(1);
  element("veil").hidden = true;
  for (const [id, change] of sent) {
    if (change.request !== undefined && frame.run === change.run && frame.request >= change.request) {
      if (change.prompt) setNumber("latency", ...seconds(now - change.at));
      sent.delete(id);
    }
  }
}

stream.addEventListener("frame", ({ detail: frame }) => {
  frame.decoded = decode(frame);
  player?.push(frame);
});

stream.addEventListener("fence", ({ detail }) => player?.fence(detail.run, detail.request));

// ---- connection and control --------------------------------------------------------------------------------------

stream.addEventListener("open", ({ detail: hello }) => {
  facts = hello.stream;
  client = hello.client;
  sessionStorage.setItem("resume", hello.resume);
  document.title = `${facts.model} – Tessera`;
  element("model").textContent = facts.model;
  element("facts").textContent =
    `${facts.mesh} on ${facts.device}, ${facts.width} × ${facts.height}, ${facts.frame_rate} frames per second, plan ${facts.plan.slice(0, 12)}`;
  if (canvas.width !== facts.width || canvas.height !== facts.height) {
    [canvas.width, canvas.height] = [facts.width, facts.height];
  }
  canvas.classList.toggle("small", facts.width <= 256);
  element("screen").style.setProperty("--shape", `${facts.width}/${facts.height}`);
  element("examples").replaceChildren(...facts.examples.map((text) => promptButton(text)));
  showSettings();
  player ??= new Player({ frameRate: facts.frame_rate, chunkFrames: facts.chunk_frames, show, discard: replace });
  element("alarms").replaceChildren();
  showControl(hello.control);
});

stream.addEventListener("lost", () => {
  setState("lost");
  element("veil").hidden = false;
  element("veil").textContent = "The connection was lost. Trying again.";
});

stream.addEventListener("bye", ({ detail }) => say(`${detail.code}: ${detail.message}`, "bad"));

function setState(state) {
  element("state").dataset.state = state;
  element("state").textContent = state === "lost" ? "connection lost" : state;
}

stream.addEventListener("control", ({ detail }) => showControl(detail));
stream.addEventListener("control_wanted", ({ detail }) => {
  wanted = detail.client;
  element("give").hidden = false;
  element("give").textContent = `Hand over to viewer ${wanted}`;
  say(`Viewer ${wanted} asks for the control.`);
});

function showControl({ holder, is_you: isYou }) {
  inControl = isYou;
  if (!isYou) element("give").hidden = true;
  element("control").textContent = isYou
    ? `You, viewer ${client}, control the stream.`
    : holder === null
      ? `Nobody controls the stream. You are viewer ${client}.`
      : `Viewer ${holder} controls the stream. You are viewer ${client} and watch.`;
  element("take").textContent = isYou ? "Release control" : holder === null ? "Take control" : "Ask for control";
  for (const id of ["prompt", "send", "pause", "cut", "flush", "seed", "steps", "bias", "lora"]) element(id).disabled = !isYou;
  document.querySelectorAll("[data-prompt]").forEach((button) => (button.disabled = !isYou));
}

element("take").onclick = () => stream.control(inControl ? "release" : "take");
element("give").onclick = () => {
  stream.control({ hand_over: wanted });
  element("give").hidden = true;
};

// ---- changes -----------------------------------------------------------------------------------------------------

function change(what, name) {
  const id = stream.change(what);
  sent.set(id, { at: performance.now(), name, prompt: what.prompt });
  say(`${name}: sent`);
}

function sendPrompt(text) {
  const prompt = text.trim();
  if (!prompt) return say("Write a prompt first.", "bad");
  element("prompt").value = prompt;
  change({ prompt }, "Prompt");
}

stream.addEventListener("effect", ({ detail }) => {
  const known = sent.get(detail.id);
  if (!known) return;
  Object.assign(known, { run: detail.run, request: detail.request });
  say(`${known.name} holds from chunk ${detail.request}.`, "good");
  if (known.prompt) {
    history.unshift({ prompt: known.prompt, request: detail.request });
    history.splice(30);
    sessionStorage.setItem("prompts", JSON.stringify(history));
    showHistory();
  }
});

stream.addEventListener("refused", ({ detail }) => {
  sent.delete(detail.id);
  say(`${detail.code}: ${detail.message}${detail.hint ? `. ${detail.hint}` : ""}`, "bad");
});

function promptButton(text) {
  const button = make("button", text, { type: "button", "data-prompt": "" });
  button.disabled = !inControl;
  button.onclick = () => sendPrompt(text);
  return button;
}

function showHistory() {
  const rows = history.map(({ prompt, request }) => make("li", "", {}, promptButton(prompt), make("small", `chunk ${request}`)));
  element("history").replaceChildren(...rows);
  if (rows.length === 0) element("history").append(make("li", "", {}, make("small", "Prompts that you send appear here.")));
}

element("form").onsubmit = (event) => {
  event.preventDefault();
  sendPrompt(element("prompt").value);
};
element("prompt").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    sendPrompt(element("prompt").value);
  }
};
element("cut").onclick = () => change("cut", "Cut");
element("flush").onclick = () => change("flush", "Flush");
element("pause").onclick = () => togglePause();
element("seed").onchange = ({ target }) => {
  const seed = Number(target.value);
  if (Number.isSafeInteger(seed) && seed >= 0) change({ seed }, "Seed");
  else say("A seed is a whole number of at least 0.", "bad");
};
element("steps").onchange = ({ target }) => change({ steps: target.value }, "Steps");
element("lora").onchange = ({ target }) => change({ lora: target.value || null }, "LoRA");
element("bias").onchange = ({ target }) => {
  const bias = Number(target.value);
  if (bias > 0 && bias <= 1) change({ bias }, "Bias");
  else say("A context bias is above 0 and at most 1.", "bad");
};

/** Shows the settings that this stream has: those of one choice are none. */
function showSettings() {
  const offer = (id, rows) => {
    element(id).replaceChildren(...rows.map(([value, text]) => make("option", text, { value })));
    element(id).parentElement.hidden = rows.length < 2;
  };
  offer("steps", facts.step_lists.map((name) => [name, name]));
  offer("lora", [["", "none"], ...facts.loras.map((name) => [name, name])]);
  element("bias").parentElement.hidden = !facts.reads_bias;
  element("settings").hidden = [...element("settings").children].every((setting) => setting.hidden);
}

function togglePause() {
  if (inControl) change(status?.state === "paused" ? "resume" : "pause", status?.state === "paused" ? "Resume" : "Pause");
}
document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input, textarea, button, a, summary");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    event.preventDefault();
    element("prompt").focus();
  } else if (event.key === " ") {
    event.preventDefault();
    togglePause();
  }
});

// ---- figures -----------------------------------------------------------------------------------------------------

stream.addEventListener("status", ({ detail }) => {
  status = detail;
  if (player) player.playOut.expectsChunks = status.state === "running";
  setState(status.state);
  element("pause").textContent = status.state === "paused" ? "Resume" : "Pause";
  element("shown").textContent = status.prompt ? `“${status.prompt}”` : "";
  canvas.setAttribute("aria-label", `The video: ${status.prompt}`);
  if (!["running", "paused"].includes(status.state)) {
    element("veil").hidden = false;
    element("veil").textContent = {
      starting: "The ranks load.",
      restarting: "The stream has failed, and starts again.",
      ended: "The stream has ended.",
      idle: "Nobody watches.",
      waiting_for_video: "The stream waits for frames from the client in control.",
    }[status.state];
  }
  const inForce = { seed: status.seed, steps: status.steps, bias: status.bias ?? facts?.bias, lora: status.lora ?? "" };
  for (const [id, value] of Object.entries(inForce)) {
    if (document.activeElement !== element(id)) element(id).value = value;
  }
  showFigures();
});

function showFigures() {
  if (!status || !facts || status.chunks === 0) return;
  setNumber("possible-fps", status.possible_fps.toFixed(1));
  // Ranks that wait for the pace leave nothing to overlap.
  const waits = status.possible_fps > 1.2 * facts.frame_rate;
  setNumber("overlap", status.overlap_score === null || waits ? "–" : status.overlap_score.toFixed(2));
  element("overlap-name").textContent = waits ? "OverlapScore: none while the ranks wait for the pace" : "OverlapScore";
  setNumber("call", ...seconds(status.call_ms));
  setNumber("queues", `${status.queued_in}, ${status.queued_out}`);
  const keepsUp = status.possible_fps >= facts.frame_rate;
  const share = status.possible_fps / facts.frame_rate;
  element("verdict").dataset.kind = keepsUp ? "good" : "bad";
  element("verdict").textContent = keepsUp
    ? `Yes: the ranks are ${share.toFixed(1)} times as fast as the video plays.`
    : `No: the ranks reach ${(100 * share).toFixed(0)} % of the ${facts.frame_rate} frames per second at which the video plays.`;
  const kinds = new Map();
  for (const [name, ms] of status.phases) {
    const [total, times] = kinds.get(kindOf(name)) ?? [0, 0];
    kinds.set(kindOf(name), [total + ms, times + 1]);
  }
  const longest = Math.max(...[...kinds.values()].map(([ms]) => ms), 0.001);
  element("phases").replaceChildren(
    ...[...kinds].map(([name, [ms, times]]) => {
      const bar = make("i");
      bar.style.width = `${(100 * ms) / longest}%`;
      bar.style.background = colorOf(name);
      return make("div", "", { class: "phase" }, make("span", times > 1 ? `${name} × ${times}` : name), make("span", "", {}, bar), make("b", seconds(ms).join(" ")));
    }),
  );
  const dropped = status.dropped > 0 ? `, ${status.dropped} dropped for this page` : "";
  const stalls = player ? `, ${player.playOut.stalls} stalls` : "";
  element("totals").textContent =
    `Run ${status.run}: ${status.chunks} chunks, ${status.frames} frames${dropped}${stalls}. Viewers: ${status.clients}.`;
}

setInterval(() => {
  if (!player || player.intervals.length < 8) return;
  const recent = player.intervals.slice(-48);
  setNumber("shown-fps", ((1000 * recent.length) / recent.reduce((a, b) => a + b, 0)).toFixed(1));
}, 1000);

setInterval(async () => {
  if (document.hidden || !status?.chunks) return;
  const answer = await fetch("api/v1/timeline").catch(() => null);
  if (answer?.ok) drawTimeline((await answer.json()).chunks);
}, 1500);

function drawTimeline(chunks) {
  if (chunks.length === 0) return;
  const svgOf = (name, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    return made;
  };
  const [from, to] = [chunks[0].span[0], Math.max(...chunks.map((c) => c.span[1]))];
  const ranks = [...new Set(chunks.flatMap((c) => c.ranks.map((r) => r.rank)))].sort((a, b) => a - b);
  const [left, width, lane, top] = [64, 1096, 22, 18];
  const x = (ms) => left + ((ms - from) / Math.max(to - from, 0.001)) * (width - left);
  const height = top + ranks.length * lane + 4;
  const svg = svgOf("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.append(svgOf("title", {}));
  svg.firstChild.textContent = `Phases of the last ${chunks.length} chunks on ${ranks.length} ranks, over ${(to - from).toFixed(0)} milliseconds`;
  const write = (text, px, py) => {
    const isLast = px > width - 70;
    const label = svgOf("text", { x: isLast ? width : px, y: py, "text-anchor": isLast ? "end" : "start" });
    label.textContent = text;
    svg.append(label);
  };
  ranks.forEach((rank, row) => {
    write(`rank ${rank}`, 0, top + row * lane + 14);
    svg.append(svgOf("rect", { x: left, y: top + row * lane, width: width - left, height: lane - 4, class: "ground" }));
  });
  for (const chunk of chunks) {
    write(`chunk ${chunk.chunk}${chunk.cut ? ", cut" : ""}`, x(chunk.span[0]) + 3, 11);
    svg.append(svgOf("line", { x1: x(chunk.span[0]), x2: x(chunk.span[0]), y1: 2, y2: height, class: "edge" }));
    for (const { rank, phases } of chunk.ranks) {
      for (const { name, span, stream: lane_name } of phases) {
        const y = top + ranks.indexOf(rank) * lane + (lane_name === "decode" ? lane / 2 - 2 : 0);
        const tall = lane_name === "decode" ? lane / 2 - 2 : lane - 4;
        const bar = svgOf("rect", { x: x(span[0]), y, width: Math.max(x(span[1]) - x(span[0]), 0.7), height: tall });
        bar.style.fill = colorOf(name);
        bar.append(svgOf("title", {}));
        bar.firstChild.textContent = `${name} on ${lane_name}: ${(span[1] - span[0]).toFixed(1)} ms`;
        svg.append(bar);
      }
    }
  }
  element("timeline").replaceChildren(svg);
  element("legend").replaceChildren(
    ...[...colors].map(([kind, color]) => {
      const box = make("i");
      box.style.background = color;
      return make("li", "", {}, box, kind);
    }),
  );
}

// ---- alarms ------------------------------------------------------------------------------------------------------

stream.addEventListener("alarm", ({ detail: alarm }) => {
  element("alarm-section").hidden = false;
  const next = !alarm.restarts
    ? "The stream does not start again."
    : alarm.regenerates === null
      ? "The stream starts again by itself."
      : `It starts again, generates ${alarm.regenerates} chunks again, and continues with the next one.`;
  const details = alarm.details.map((line) => make("li", line));
  element("alarms").prepend(
    make(
      "div",
      "",
      { class: "alarm" },
      make("p", `${alarm.code}: ${alarm.title}`, { class: "title" }),
      make("p", alarm.message),
      make("ul", "", {}, ...details),
      make("p", `Run ${alarm.run} has ended. ${next}`),
      make("details", "", {}, make("summary", `What ${alarm.code} means`), make("p", alarm.explanation)),
    ),
  );
});

// ---- pictures ----------------------------------------------------------------------------------------------------

function addDownload(href, name, note) {
  element("downloads").prepend(make("li", "", {}, make("a", name, { href, download: name }), ` ${note}`));
}

element("snapshot").onclick = () =>
  canvas.toBlob((blob) => {
    const name = `tessera-${latest?.frame ?? 0}.png`;
    addDownload(URL.createObjectURL(blob), name, `frame ${latest?.frame ?? 0}`);
  });

let recorder = null;
element("record").onclick = () => {
  if (recorder) return recorder.stop();
  if (!window.MediaRecorder || !canvas.captureStream) return say("This browser records no canvas. Record losslessly instead.", "bad");
  const pieces = [];
  recorder = new MediaRecorder(canvas.captureStream(facts.frame_rate), { mimeType: "video/webm" });
  recorder.ondataavailable = ({ data }) => pieces.push(data);
  recorder.onstop = () => {
    recorder = null;
    showRecording();
    const blob = new Blob(pieces, { type: "video/webm" });
    addDownload(URL.createObjectURL(blob), "tessera.webm", `${(blob.size / 1e6).toFixed(1)} MB`);
  };
  recorder.start();
  showRecording();
};

let isLossless = false;
element("lossless").onclick = async () => {
  const path = isLossless ? "api/v1/recordings/current" : "api/v1/recordings";
  const answer = await fetch(path, { method: isLossless ? "DELETE" : "POST" });
  const body = await answer.json();
  if (!answer.ok) return say(`${body.code}: ${body.message}`, "bad");
  if (isLossless) {
    const name = `recording-${body.number}.y4m`;
    addDownload(`api/v1/recordings/${body.number}.y4m`, name, `${body.frames} frames, ${(body.bytes / 1e6).toFixed(1)} MB`);
  }
  isLossless = !isLossless;
  showRecording();
};

function showRecording() {
  element("record").textContent = recorder ? "Stop recording" : "Record";
  element("lossless").textContent = isLossless ? "Stop lossless recording" : "Record losslessly";
  element("recording").hidden = !recorder && !isLossless;
}

showHistory();
// For measurements of the play-out.
window.tessera = { stream, get player() { return player; }, get status() { return status; }, get latest() { return latest; } };
