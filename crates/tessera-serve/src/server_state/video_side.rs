//! The input video: its frames from the client in control, and the leader that takes them.

use std::time::{Duration, Instant};

use axum::body::Bytes;
use tessera::video_feed::{FeedRequest, VideoFeed};
use tessera_base::Diagnostic;

use super::{GuardedState, Joined, ServerState};
use crate::codes::{T1603, T1604, T1617};
use crate::protocol::{
    MAX_CLIENT_MESSAGE_BYTES, Refusal, ServerMessage, StreamState, VIDEO_FRAME_HEADER_BYTES, VideoFrameHeader,
};
use crate::video_intake::{FrameRefusal, VideoGrant, VideoIntake};

/// Chunks that play while the leader waits for frames of a video that keeps up. A live video is always waited for.
const PATIENCE_CHUNKS: f64 = 2.0;

impl ServerState {
    /// Returns the most bytes of a message on the socket.
    pub(crate) fn max_message_bytes(&self) -> usize {
        let frame = self.facts.width as usize * self.facts.height as usize * 3;
        match self.facts.video_in {
            Some(_) => MAX_CLIENT_MESSAGE_BYTES.max(VIDEO_FRAME_HEADER_BYTES + frame),
            None => MAX_CLIENT_MESSAGE_BYTES,
        }
    }

    /// Takes a binary message of a client: a frame of the input video.
    ///
    /// # Errors
    /// T1603 if the stream has no input video, T1604 if the client is not in control, T1617 if the message is no frame of the
    /// stream or the client has no credit for it.
    pub(crate) fn take_video_frame(&self, joined: &Joined, message: &Bytes) -> Result<(), Refusal> {
        let refuse = |d: Diagnostic| Err(Refusal::from_diagnostic(&d));
        let Some(video) = &self.video else {
            return refuse(Diagnostic::error(&T1603, "a binary message; this stream has no input video"));
        };
        let size = format!("{} x {} pixels", self.facts.width, self.facts.height);
        let Some((header, _)) = VideoFrameHeader::decode(message) else {
            let what = format!("a binary message of {} bytes is no frame of the input video", message.len());
            return refuse(Diagnostic::error(&T1617, what).with_hint(format!(
                "send `TSV1`, the format 1, the size, the number of bytes, and the bytes of RGB of {size}"
            )));
        };
        if (u32::from(header.width), u32::from(header.height)) != (self.facts.width, self.facts.height) {
            let what = format!("a frame of {} x {} pixels", header.width, header.height);
            return refuse(Diagnostic::error(&T1617, what).with_hint(format!("scale frames to {size}")));
        }
        // Another connection of the client begins under the same lock, so that this frame spends none of its credits.
        let state = self.lock();
        let current = state.clients.get(&joined.client).map(|client| client.connection);
        if current != Some(joined.connection) {
            return refuse(Diagnostic::error(&T1604, "the client continues on another connection"));
        }
        match video.push(joined.client, message.slice(VIDEO_FRAME_HEADER_BYTES..)) {
            Ok(()) => Ok(()),
            Err(FrameRefusal::NotInControl) => refuse(
                Diagnostic::error(&T1604, "a frame of a client that does not control the stream")
                    .with_hint("take the control first, and send frames when `video_credits` arrives"),
            ),
            Err(FrameRefusal::NoCredit) => refuse(
                Diagnostic::error(&T1617, "a frame beyond the credits of the client")
                    .with_hint("send as many frames as the `video_credits` messages add up to"),
            ),
        }
    }

    /// Hands frames to the leader of a run, as it requests them, until the run ends.
    pub(crate) fn feed_video(&self, run: u32, mut feed: VideoFeed) {
        let Some(video) = &self.video else { return };
        while let Some(request) = feed.next_request() {
            let is_taken = match request {
                FeedRequest::Chunk => {
                    self.note_leader_ready(run);
                    match video.wait_for_chunk(run) {
                        Some(begins_scene) => feed.confirm_chunk(begins_scene),
                        None => return,
                    }
                }
                FeedRequest::Frames(frames) => {
                    let Some(taken) = self.take_frames(video, run, frames as usize) else { return };
                    taken.iter().all(|rgb| feed.send_frame(rgb))
                }
            };
            if !is_taken {
                return;
            }
        }
    }

    /// Lets no further frame reach the leader: it requests no chunk after those under way.
    pub(crate) fn end_video(&self) {
        self.video.iter().for_each(|video| video.end_run());
    }

    /// Gives the run that begins the frames that follow, and the client in control the credits of those that were discarded.
    pub(super) fn begin_video(&self, state: &GuardedState) {
        let grant = self.video.as_ref().and_then(|video| video.begin_run(state.run));
        self.send_grant(state, grant);
    }

    /// Lets the client in control send frames, and no other.
    pub(super) fn update_video_sender(&self, state: &GuardedState, now: Instant) {
        let grant = self.video.as_ref().and_then(|video| video.set_sender(state.lease.holder(now)));
        self.send_grant(state, grant);
    }

    /// Whether the leader has waited for frames for longer than a video lets it wait that keeps up.
    pub(super) fn is_waiting_for_video(&self, now: Instant) -> bool {
        let period = f64::from(self.facts.chunk_frames) / self.facts.frame_rate.max(0.1);
        let patience = Duration::from_secs_f64(PATIENCE_CHUNKS * period);
        self.video.as_ref().is_some_and(|video| video.is_waited_for(now, patience))
    }

    /// Notes that the leader takes frames, and so takes changes as well: without a frame there would be no first chunk to show it.
    fn note_leader_ready(&self, run: u32) {
        let mut state = self.lock();
        if state.run == run && state.phase == StreamState::Starting {
            state.phase = StreamState::Running;
            self.send_status(&state);
        }
    }

    /// Takes frames for the leader of a run, and gives their credits back. A client that begins a new connection between the two would count
    /// these credits twice, so one lock covers both.
    fn take_frames(&self, video: &VideoIntake, run: u32, frames: usize) -> Option<Vec<Bytes>> {
        let state = self.lock();
        let (taken, grant) = video.take_frames(run, frames)?;
        self.send_grant(&state, grant);
        Some(taken)
    }

    fn send_grant(&self, state: &GuardedState, grant: Option<VideoGrant>) {
        if let Some(VideoGrant { client, frames, dropped }) = grant
            && let Some(client) = state.clients.get(&client)
        {
            client.send(&ServerMessage::VideoCredits { frames, dropped });
        }
    }
}
