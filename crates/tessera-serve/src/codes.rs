//! The diagnostic codes of this crate, in order of id.

tessera_base::codes! {
    T1601: "address of the server cannot be used",
    "`tessera serve --listen ADDRESS:PORT` opens a socket for browsers and applications. The address belongs to no interface of this \
machine, the port is taken by another program, or it is below 1024 and needs a permission. Name another one; port 0 lets \
the system choose, and the server prints it.";

    T1602: "access to the server is refused",
    "A server that is reached over the network asks for its token: as `Authorization: Bearer TOKEN`, or once as `?token=TOKEN` in the \
address of the page. A request whose Host is not an address or a name of the server, or whose Origin is another site, is refused as well: \
otherwise a page of that site could control the stream through your browser. Allow a site with `--origin https://HOST`, and a name of this \
server with `--host NAME`.";

    T1603: "message is no message of the protocol",
    "A client sends JSON in text messages on the socket, as docs/reference/stream-protocol.md describes: first `hello` with version 1, then `credits`, \
`change` and `control`. Binary messages are for streams with an input video. A message that cannot be read, that is too long, or that comes in place of the first one ends the connection. The \
stream goes on.";

    T1604: "client is not in control",
    "One client controls a stream, and the others watch. Ask for the control with `{\"type\":\"control\",\"action\":\"take\"}`: \
it is given at once if nobody has it, and otherwise the client in control is asked to hand it over. A client whose \
connection was lost keeps the control for ten seconds.";

    T1605: "server takes no further client",
    "The number of clients and of connections is limited, so that one program cannot take the machine from the stream. A mesh runs one \
stream, which every client shares. Close a client, or start the server with larger `--max-clients`.";

    T1606: "client sends too many messages",
    "A client may send a hundred messages at once, and fifty per second after that. A message beyond that is refused and has no effect; a client that goes on is \
disconnected. Send `credits` once per chunk rather than once per frame.";

    T1607: "client reads too slowly",
    "The server waits for no client. Frames that a client does not take are dropped, oldest first. A client that also takes no \
messages, or that answers no ping for fifteen seconds, is disconnected. It may connect again with the secret of its hello, and keeps the control if \
it returns within ten seconds.";

    T1608: "recording cannot be made",
    "A recording holds every frame from its start to its end, as YUV4MPEG2. It needs a stream that runs, one recording at a time, and \
space on the disk. It ends by itself at the limit of its bytes. Recordings are in the folder that the server printed at its start.";

    T1609: "options of the server contradict each other",
    "A server that other machines reach needs a token of at least 16 characters, from `--token-file` or the variable TESSERA_SERVE_TOKEN; a server on a \
loopback address needs none. `--tls-cert` and `--tls-key` belong together, and each names a PEM file. \
`--video-in` excludes `--resume` and `--continue-after-failure`, because nobody keeps the frames of a video.";

    T1610: "stream takes no changes now",
    "The ranks load, restart or have ended, so no chunk can be requested with the change. `status` messages state what the stream \
does; send the change again when its state is `running`.";

    T1611: "recorded session cannot be continued",
    "`tessera serve --resume RUN` generates the chunks of a record again and shows those that follow. Chunks have the same bits if plan, weights, build and kind of \
machine are those of the session, and each one is compared with the digest of its latents in the record. A record of another plan, one without \
chunks, and a chunk that differs end the server before anything is shown. Start without `--resume` for a new scene. A restart with `--continue-after-failure` compares chunks in the same way, and \
begins a new scene after one that differs: look for a GPU that computes wrongly.";

    T1612: "address of the trace collector cannot be used",
    "`tessera serve --otlp http://HOST:4318` sends traces to an OpenTelemetry collector, as OTLP over HTTP with JSON. Without the flag, the variables \
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and OTEL_EXPORTER_OTLP_ENDPOINT may name it. The server speaks no TLS to collectors and sends them no secret, so the address begins with \
`http://` and names no user: run a collector on this host or in this cluster, and let it encrypt what it sends on. OTEL_SDK_DISABLED=true ignores the variables.";

    T1613: "trace collector takes no spans",
    "The OpenTelemetry collector cannot be reached, does not answer within ten seconds, or refuses the spans. The stream goes on. Up to 8192 spans wait, and the server tries again after one \
second to thirty; further spans are dropped, and `tessera_spans` of /metrics counts them. A server warns once, and again only after the collector has taken spans. An address of the gRPC port 4317 \
gives this warning too: use the HTTP port, usually 4318.";

    T1614: "scene of a failed run cannot continue",
    "A run of `tessera serve --continue-after-failure` has failed, and the next run begins a new scene with the settings in force. To continue the scene, it would have to generate every chunk of the failed run again that was shown, from chunk 0 on, \
because the noise of a chunk depends on its number. Either these chunks are more than the limit, which is 256 unless the flag states another one, or `record.jsonl` in the folder of the failed run lacks one of them, as after a full disk or a leader that was killed; \
the message says which, with both numbers or the file. For longer scenes, start the server with `--continue-after-failure=CHUNKS`: the wait after a failure is then as long as the ranks took for these chunks, without the pauses. For a record that lacks chunks, \
look at the first alarm of the run and at the space on the disk of `--out`.";

    T1615: "server has no such format of frames",
    "The `hello` of a client named the format `mp4`, and this server has none, so it ended the connection. Every server sends frames as `raw` and `jpeg`; `formats` in `stream` of the server's `hello` and of `/api/v1/status` lists all that it has. \
The format `mp4` needs a program that was built with `cargo build --features h264`, because its encoder builds C++, and a stream whose width and height are even numbers of pixels. Name `jpeg` in the `hello`, \
or start the server with such a program.";

    T1616: "server has no LoRA of this name",
    "A client chooses among the LoRAs that the server was started with, by name, so that nobody names a file of the server. Start it with `--lora NAME=FILE`, and with `--lora NAME=FILE:STRENGTH` for the \
strength that the publisher states; `hello` lists the names.";

    T1617: "frame of the input video is not taken",
    "A server with `--video-in` takes frames of the input video as binary messages of the client in control: a header of 16 bytes and raw RGB in the size of the stream. \
The client may send as many frames as the `video_credits` messages that it has received add up to: those of two chunks, and then as many as the leader takes. A message that is no such frame, or that is beyond the \
credits, is refused, and the stream does not see it. docs/reference/stream-protocol.md describes the bytes.";
}
