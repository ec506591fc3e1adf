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
    format: ["none", "raw", "jpeg", "mp4"][view.getUint8(4)],
    isFirst: Boolean(flags & 1),
    isLast: Boolean(flags & 2),
    isInitialisation: Boolean(flags & 4),
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

/** Most that the clock of the play-out departs from that of the model: nobody sees one percent. */
const CLOCK_CORRECTION = 0.01;
/** Share of a new depth in the mean depth. */
const DEPTH_SHARE = 0.1;
/** Longest time for which the first frame of a chunk waits before the play begins. */
const LONGEST_RESERVE_MS = 250;
/** Chunks within which two stalls show that the ranks are slower than the video. */
const STALL_CHUNKS = 64;
/** Chunks that a stall lasts at most; what lasts longer is a pause. */
const PAUSE_CHUNKS = 8;
/** How much faster the play becomes with each chunk while the ranks prove faster than it. */
const RECOVERY = 1.05;
/** Slowest play, as a share of the frame rate. */
const SLOWEST = 0.02;

/**
 * Decides when each frame is shown. A chunk arrives at once, so its frames wait, and the first one waits for half a chunk: that
 * is the reserve against chunks that come late. Frames follow at the frame rate of the model, corrected by at most one percent
 * so that the reserve stays as it is. The arrival of a single chunk never changes the interval, because an interval that
 * follows the arrivals shows their jitter.
 *
 * If the ranks are slower than the video, the reserve runs out: that is a stall. After two of them the frames are shown at the
 * rate at which chunks arrived between them. That rate rises again while more than a chunk waits beside the reserve.
 *
 * Times are arguments in milliseconds, so that tests need no clock. `tessera-bench serve` plays by the same rule
 * (`play_out.rs`), and both are tested with the same cases.
 */
export class PlayOut {
  #due = 0;
  #isPlaying = false;
  #depth;
  #share = 1;
  #chunks = 0;
  /** When the reserve ran out, and the arrival that ended the stall before. */
  #emptySince = null;
  #lastStall = null;

  /** `earlyMs`: how much before its time a frame may be shown. */
  constructor({ frameRate, chunkFrames, earlyMs = 0 }) {
    this.frameMs = 1000 / frameRate;
    this.chunkFrames = chunkFrames;
    this.earlyMs = earlyMs;
    this.reserveMs = Math.min((chunkFrames * this.frameMs) / 2, LONGEST_RESERVE_MS);
    this.#depth = this.reserveMs / this.frameMs;
    this.stalls = 0;
    /** Whether further chunks are to be expected. Without them, an empty queue is no stall. */
    this.expectsChunks = true;
  }

  /** Notes the arrival of a frame, before which `waiting` frames wait. */
  arrive(isFirst, waiting, now) {
    const reserve = this.reserveMs / this.frameMs;
    if (isFirst) {
      this.#chunks += 1;
      if (this.#isPlaying) this.#depth += DEPTH_SHARE * (waiting - this.#depth);
      // A queue that fills shows that the ranks are faster than a play that followed them.
      if (waiting > reserve + this.chunkFrames) this.#share = Math.min(this.#share * RECOVERY, 1);
    }
    if (this.#isPlaying) return;
    if (this.#emptySince !== null) this.#endStall(now);
    this.#isPlaying = true;
    this.#depth = reserve;
    this.#due = now + this.reserveMs;
  }

  /** Returns how many of the waiting frames are never shown, because the time of later ones has come, and whether the next one is shown now. */
  take(waiting, now) {
    if (!this.#isPlaying) return { skipped: 0, shows: false };
    const interval = this.interval;
    if (waiting === 0) {
      if (now > this.#due + interval / 2) this.#runDry();
      return { skipped: 0, shows: false };
    }
    // A page that was busy for a moment shows every frame, one per refresh; after a longer time it catches up.
    const late = Math.floor((now - this.#due) / interval - this.chunkFrames / 2);
    const skipped = Math.min(Math.max(late, 0), waiting - 1);
    this.drop(skipped, now);
    const shows = now + this.earlyMs >= this.#due;
    if (shows) this.#due += interval;
    return { skipped, shows };
  }

  /** Notes that so many frames at the front are not shown. Their time passes all the same, but not beyond now. */
  drop(frames, now) {
    const due = Math.min(this.#due + frames * this.interval, now);
    this.#due = Math.max(this.#due, due);
    // What waited was behind its time, and no reserve.
    if (frames > 0) this.#depth = this.reserveMs / this.frameMs;
  }

  /** Begins anew with the next frame that arrives: the waiting ones are out of date. */
  restart() {
    this.#isPlaying = false;
    this.#emptySince = null;
    this.#lastStall = null;
  }

  /** Milliseconds between frames now. */
  get interval() {
    const reserve = this.reserveMs / this.frameMs;
    const error = Math.min(Math.max((this.#depth - reserve) / reserve, -1), 1);
    return this.frameMs / (this.#share * (1 + CLOCK_CORRECTION * error));
  }

  #runDry() {
    if (!this.expectsChunks) return this.restart();
    this.#isPlaying = false;
    this.#emptySince = this.#due;
    this.stalls += 1;
  }

  #endStall(now) {
    const chunkMs = this.chunkFrames * this.frameMs;
    const last = this.#lastStall;
    const isPause = now - this.#emptySince > PAUSE_CHUNKS * chunkMs;
    if (last !== null && !isPause && this.#chunks - last.chunks <= STALL_CHUNKS) {
      const share = ((this.#chunks - last.chunks) * chunkMs) / (now - last.at);
      this.#share = Math.min(Math.max(share, SLOWEST), 1);
    }
    this.#emptySince = null;
    this.#lastStall = isPause ? null : { at: now, chunks: this.#chunks };
  }
}

/**
 * Shows frames in a browser when their time has come. `show` gets each frame, and `discard` the number of frames that are never
 * shown: both used up a credit.
 */
export class Player {
  #queue = [];
  #lastShown = 0;

  constructor({ frameRate, chunkFrames, show, discard }) {
    // Half a refresh early is nearer than half a refresh late.
    this.playOut = new PlayOut({ frameRate, chunkFrames, earlyMs: 6 });
    this.chunkFrames = chunkFrames;
    this.show = show;
    this.discard = discard;
    this.intervals = [];
    requestAnimationFrame((now) => this.#tick(now));
  }

  /** Adds a frame behind the others. */
  push(frame, now = performance.now()) {
    this.playOut.arrive(frame.isFirst, this.#queue.length, now);
    this.#queue.push(frame);
    // A page that is hidden gets no ticks, and keeps nothing old.
    const surplus = this.#queue.length - 3 * this.chunkFrames;
    if (surplus <= 0) return;
    this.playOut.drop(surplus, now);
    this.#remove(surplus);
  }

  /** Forgets frames that come before a request of a run. */
  fence(run, request) {
    const valid = this.#queue.filter((f) => f.run > run || (f.run === run && f.request >= request));
    this.discard(this.#queue.length - valid.length);
    this.#queue = valid;
    if (valid.length === 0) this.playOut.restart();
  }

  get waiting() {
    return this.#queue.length;
  }

  #remove(frames) {
    this.#queue.splice(0, frames);
    this.discard(frames);
  }

  #tick(now) {
    requestAnimationFrame((next) => this.#tick(next));
    const { skipped, shows } = this.playOut.take(this.#queue.length, now);
    if (skipped > 0) this.#remove(skipped);
    if (!shows) return;
    const frame = this.#queue.shift();
    if (this.#lastShown > 0) {
      this.intervals.push(now - this.#lastShown);
      if (this.intervals.length > 600) this.intervals.shift();
    }
    this.#lastShown = now;
    this.show(frame, now);
  }
}
