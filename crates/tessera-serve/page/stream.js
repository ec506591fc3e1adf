// A client of the stream protocol, version 1. It knows no page: an application may import it.

export const HEADER_BYTES = 48;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8000;

/** Reads the header of a binary message, and returns it with the bytes of the picture. */
export function parseFrame(buffer) {
  const view = new DataView(buffer);
  if (buffer.byteLength < HEADER_BYTES || view.getUint32(0, false) !== 0x54534631) throw new Error("no frame");
  const flags = view.getUint8(5);
  return {
    format: ["none", "raw", "jpeg"][view.getUint8(4)],
    isFirst: Boolean(flags & 1),
    isLast: Boolean(flags & 2),
    run: view.getUint32(8, true),
    epoch: view.getUint32(12, true),
    request: Number(view.getBigUint64(16, true)),
    frame: Number(view.getBigUint64(24, true)),
    deliveredMs: Number(view.getBigUint64(32, true)) / 1000,
    width: view.getUint16(40, true),
    height: view.getUint16(42, true),
    picture: new Uint8Array(buffer, HEADER_BYTES, view.getUint32(44, true)),
  };
}

/**
 * A connection that comes back when it is lost, as the same client. Events: `open`, `lost`, `frame` (detail: parseFrame),
 * and one per type of server message (detail: the message).
 */
export class TesseraStream extends EventTarget {
  #socket = null;
  #secret = null;
  #wait = FIRST_WAIT_MS;
  #closed = false;
  #changes = 0;

  /** `resume` is the secret of an earlier connection, as which this one continues. */
  constructor(url, { format = "jpeg", control = false, credits = 0, resume = null } = {}) {
    super();
    this.url = url;
    this.hello = { format, control, credits };
    this.#secret = resume;
    this.#connect();
  }

  /** Lets the server send so many more frames. */
  grant(frames) {
    this.#send({ type: "credits", frames });
  }

  /** Requests a change such as "cut" or { prompt: "…" }. Returns its number, which the answers repeat. */
  change(change) {
    this.#changes += 1;
    this.#send({ type: "change", id: this.#changes, change });
    return this.#changes;
  }

  /** Asks about the control: "take", "release" or { hand_over: client }. */
  control(action) {
    this.#send({ type: "control", action });
  }

  /** Ends the connection for good, which frees the control. */
  close() {
    this.#closed = true;
    this.#socket?.close(1000);
  }

  #connect() {
    const socket = new WebSocket(this.url);
    socket.binaryType = "arraybuffer";
    this.#socket = socket;
    socket.onopen = () => {
      const resume = this.#secret ? { resume: this.#secret } : {};
      this.#send({ type: "hello", version: 1, ...this.hello, ...resume });
    };
    socket.onmessage = ({ data }) => {
      if (typeof data !== "string") return this.#emit("frame", parseFrame(data));
      const message = JSON.parse(data);
      if (message.type === "hello") {
        this.#secret = message.resume;
        this.#wait = FIRST_WAIT_MS;
        this.#emit("open", message);
      }
      // Another page is this client now: the next connection is a client of its own.
      if (message.type === "bye" && message.code === "T1605") this.#secret = null;
      this.#emit(message.type, message);
    };
    socket.onclose = () => {
      if (this.#closed) return;
      this.#emit("lost", null);
      setTimeout(() => this.#connect(), this.#wait);
      this.#wait = Math.min(this.#wait * 2, LONGEST_WAIT_MS);
    };
  }

  #send(message) {
    if (this.#socket?.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(message));
  }

  #emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}

/**
 * Shows frames at the pace of the model. A chunk arrives at once, so its frames wait here, at most one chunk before the first
 * one is shown. If chunks arrive more slowly than they play, the pace follows them, so that frames stay evenly spaced.
 * `show` gets each frame when it is due, and `discard` the number of frames that are never shown: both used up a credit.
 */
export class Player {
  #queue = [];
  #due = 0;
  #playing = false;
  #lastChunk = 0;
  #lastShown = 0;
  #period = 0;

  constructor({ frameRate, chunkFrames, show, discard }) {
    this.frameMs = 1000 / frameRate;
    this.chunkFrames = chunkFrames;
    this.show = show;
    this.discard = discard;
    this.stalls = 0;
    this.intervals = [];
    requestAnimationFrame((now) => this.#tick(now));
  }

  /** Adds a frame behind the others. */
  push(frame, now = performance.now()) {
    if (frame.isFirst) {
      if (this.#lastChunk > 0) {
        const period = now - this.#lastChunk;
        this.#period = this.#period > 0 ? 0.8 * this.#period + 0.2 * period : period;
      }
      this.#lastChunk = now;
    }
    this.#queue.push(frame);
    // A page that was hidden shows nothing old.
    const surplus = this.#queue.length - 3 * this.chunkFrames;
    if (surplus > 0) this.discard(this.#queue.splice(0, surplus).length);
  }

  /** Forgets frames that come before a request of a run. */
  fence(run, request) {
    const valid = this.#queue.filter((f) => f.run > run || (f.run === run && f.request >= request));
    this.discard(this.#queue.length - valid.length);
    this.#queue = valid;
    this.#period = 0;
    this.#lastChunk = 0;
  }

  get waiting() {
    return this.#queue.length;
  }

  /** Milliseconds between frames now. */
  get interval() {
    // A pause is no slow chunk.
    const arriving = this.#period < 8 * this.chunkFrames * this.frameMs ? this.#period / this.chunkFrames : 0;
    const base = Math.max(this.frameMs, arriving);
    if (this.#queue.length > 1.5 * this.chunkFrames) return base * 0.93;
    if (this.#queue.length < 0.25 * this.chunkFrames) return base * 1.04;
    return base;
  }

  #tick(now) {
    requestAnimationFrame((next) => this.#tick(next));
    if (this.#queue.length === 0) {
      if (this.#playing && now > this.#due + 2 * this.interval) {
        this.#playing = false;
        this.stalls += 1;
      }
      return;
    }
    if (!this.#playing) {
      this.#playing = true;
      this.#due = now + Math.min((this.chunkFrames * this.frameMs) / 2, 250);
    }
    // Half a refresh early is nearer than half a refresh late.
    if (now + 6 < this.#due) return;
    const frame = this.#queue.shift();
    this.#due = Math.max(this.#due + this.interval, now - this.interval);
    if (this.#lastShown > 0) {
      this.intervals.push(now - this.#lastShown);
      if (this.intervals.length > 600) this.intervals.shift();
    }
    this.#lastShown = now;
    this.show(frame, now);
  }
}
