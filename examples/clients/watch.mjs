// Watches a stream of `tessera serve`, changes its prompt, and counts the frames of each chunk.
//
//     tessera serve
//     node examples/clients/watch.mjs ws://127.0.0.1:7860/socket "a blue square moves left"
//
// Node 22 and browsers have WebSocket; for Node 20, `npm install ws`.

const Socket = globalThis.WebSocket ?? (await import("ws")).default;
const [url, prompt] = process.argv.slice(2);
const socket = new Socket(url);
const send = (message) => socket.send(JSON.stringify(message));
socket.binaryType = "arraybuffer";
let asked = false;
let effect = null;
let chunkFrames = 0;

socket.onopen = () => send({ type: "hello", version: 1, format: "jpeg", control: true, credits: 24 });
socket.onmessage = ({ data }) => {
  if (typeof data !== "string") {
    // The stream runs now, and takes changes.
    if (!asked) send({ type: "change", id: 1, change: { prompt } });
    asked = true;
    const header = new DataView(data);
    const request = Number(header.getBigUint64(16, true));
    if (header.getUint8(5) & 2) {
      console.log(`chunk ${request} is complete, ${header.getUint32(44, true)} bytes in its last frame`);
      send({ type: "credits", frames: chunkFrames });
    }
    if (effect !== null && request > effect) socket.close(1000);
    return;
  }
  const event = JSON.parse(data);
  if (event.type === "hello") chunkFrames = event.stream.chunk_frames;
  if (event.type === "effect") effect = event.request;
  if (["refused", "alarm", "bye"].includes(event.type)) {
    console.error(`${event.code}: ${event.message}`);
    process.exit(1);
  }
};
