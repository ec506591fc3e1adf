//! Frames of the input video that the client in control has sent, until the leader takes them.
//!
//! A client has a credit for each frame that it may send. Its credits and its frames that wait are those of two chunks at most, so the memory
//! is bounded, whatever the client does. Frames leave by whole chunks: those of a client that leaves in the middle of one are
//! discarded, and the frames of the next client begin a scene.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Bytes;

/// Chunks whose frames may wait, so that one is complete while another one is taken.
const CHUNKS_AHEAD: usize = 2;

/// The frames that wait, and who may send more.
#[derive(Debug)]
pub(crate) struct VideoIntake {
    /// Frames of the first chunk of a scene, and of each later one.
    first_chunk_frames: usize,
    chunk_frames: usize,
    state: Mutex<IntakeState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct IntakeState {
    /// Run of the stream whose leader takes frames; 0 before the first one.
    run: u32,
    /// Whether its leader still takes frames.
    is_open: bool,
    /// Since when its leader has waited for a chunk.
    wanted: Option<Instant>,
    /// Whether its leader has taken a chunk.
    has_taken: bool,
    /// The client in control.
    sender: Option<u64>,
    /// Frames that each client may still send.
    credits: BTreeMap<u64, usize>,
    /// Frames and their clients, oldest first.
    waiting: VecDeque<(u64, Bytes)>,
    /// Number of the oldest frames that belong to the chunk that the leader takes now.
    reserved: usize,
    /// Whether the next chunk begins a scene, because its frames are of another client.
    begins_scene: bool,
}

/// Further frames that a client may send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VideoGrant {
    pub(crate) client: u64,
    pub(crate) frames: usize,
    /// Frames of the client that were discarded.
    pub(crate) dropped: usize,
}

/// Why a frame is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FrameRefusal {
    /// Another client is in control, or none.
    NotInControl,
    /// The client has no credit.
    NoCredit,
}

impl VideoIntake {
    /// Creates an intake of a stream whose scenes begin with so many frames.
    pub(crate) fn new(first_chunk_frames: usize, chunk_frames: usize) -> VideoIntake {
        VideoIntake {
            first_chunk_frames,
            chunk_frames: chunk_frames.max(first_chunk_frames),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Returns how many frames a client may send ahead of those that the leader has taken.
    pub(crate) fn frames_ahead(&self) -> usize {
        CHUNKS_AHEAD * self.chunk_frames
    }

    /// Discards the frames that wait, and lets the leader of a run take those that follow.
    pub(crate) fn begin_run(&self, run: u32) -> Option<VideoGrant> {
        let mut state = self.lock();
        let dropped = state.waiting.iter().filter(|(client, _)| Some(*client) == state.sender).count();
        let IntakeState { sender, credits, .. } = std::mem::take(&mut *state);
        *state = IntakeState { run, is_open: true, sender, credits, ..IntakeState::default() };
        state.top_up(self.frames_ahead(), dropped)
    }

    /// Lets the run take no further chunk. Who waits for one returns.
    pub(crate) fn end_run(&self) {
        let mut state = self.lock();
        (state.is_open, state.wanted) = (false, None);
        self.changed.notify_all();
    }

    /// Notes who controls the stream. Frames of another client that wait are discarded.
    pub(crate) fn set_sender(&self, sender: Option<u64>) -> Option<VideoGrant> {
        let mut state = self.lock();
        if state.sender != sender {
            let reserved = state.reserved;
            state.waiting.truncate(reserved);
            // A chunk whose frames are reserved is of the sender before, even if the leader has taken none of them.
            state.begins_scene |= state.has_taken || reserved > 0;
            state.sender = sender;
            // Fewer frames suffice for a chunk that begins a scene.
            self.changed.notify_all();
        }
        state.top_up(self.frames_ahead(), 0)
    }

    /// Forgets the credits of a client that has another connection: it does not know which of its frames have arrived.
    pub(crate) fn forget_credits(&self, client: u64) {
        self.lock().credits.remove(&client);
    }

    /// Forgets the clients for which something does not hold.
    pub(crate) fn keep_clients(&self, is_kept: impl Fn(u64) -> bool) {
        self.lock().credits.retain(|client, _| is_kept(*client));
    }

    /// Adds a frame of a client. A frame that is refused spends its credit too, so that client and server count alike.
    pub(crate) fn push(&self, client: u64, rgb: Bytes) -> Result<(), FrameRefusal> {
        let mut state = self.lock();
        let credits = state.credits.entry(client).or_default();
        let has_credit = *credits > 0;
        *credits = credits.saturating_sub(1);
        if state.sender != Some(client) {
            return Err(FrameRefusal::NotInControl);
        }
        if !has_credit {
            return Err(FrameRefusal::NoCredit);
        }
        state.waiting.push_back((client, rgb));
        self.changed.notify_all();
        Ok(())
    }

    /// Whether the leader has waited for frames for so long.
    pub(crate) fn is_waited_for(&self, now: Instant, patience: Duration) -> bool {
        self.lock().wanted.is_some_and(|since| now.saturating_duration_since(since) >= patience)
    }

    /// Waits until the frames of a chunk have arrived, and keeps them for the run, whatever happens to the control. Returns whether
    /// they begin a scene; `None` if the run takes no further chunk.
    pub(crate) fn wait_for_chunk(&self, run: u32) -> Option<bool> {
        let mut state = self.lock();
        if state.run == run && state.is_open {
            state.wanted = Some(Instant::now());
        }
        let is_missing = |state: &mut IntakeState| {
            state.run == run && state.is_open && state.waiting.len() < self.needed_frames(state)
        };
        let mut state = self.changed.wait_while(state, is_missing).unwrap_or_else(PoisonError::into_inner);
        if state.run != run || !state.is_open {
            return None;
        }
        state.wanted = None;
        state.reserved = self.needed_frames(&state);
        Some(std::mem::take(&mut state.begins_scene))
    }

    /// Takes frames of the chunk for which the run has waited. Returns `None` for more frames than it has.
    pub(crate) fn take_frames(&self, run: u32, frames: usize) -> Option<(Vec<Bytes>, Option<VideoGrant>)> {
        let mut state = self.lock();
        if state.run != run || frames > state.reserved {
            return None;
        }
        let taken = state.waiting.drain(..frames).map(|(_, rgb)| rgb).collect();
        (state.reserved, state.has_taken) = (0, true);
        // A chunk that opens a scene takes fewer; the others are left for the next one unless their client lost the control.
        let sender = state.sender;
        state.waiting.retain(|(client, _)| Some(*client) == sender);
        Some((taken, state.top_up(self.frames_ahead(), 0)))
    }

    /// Returns the frames that the next chunk takes at most.
    fn needed_frames(&self, state: &IntakeState) -> usize {
        let opens = !state.has_taken || state.begins_scene;
        if opens { self.first_chunk_frames } else { self.chunk_frames }
    }

    fn lock(&self) -> MutexGuard<'_, IntakeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IntakeState {
    /// Gives the client in control the credits that it lacks.
    fn top_up(&mut self, most: usize, dropped: usize) -> Option<VideoGrant> {
        let client = self.sender?;
        let waiting = self.waiting.iter().filter(|(of, _)| *of == client).count();
        let credits = self.credits.entry(client).or_default();
        let frames = most.saturating_sub(waiting + *credits);
        *credits += frames;
        (frames > 0 || dropped > 0).then_some(VideoGrant { client, frames, dropped })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An intake of chunks of three frames, of which a scene's first takes two. Client 1 is in control of run 1.
    fn intake() -> VideoIntake {
        let intake = VideoIntake::new(2, 3);
        assert_eq!(intake.begin_run(1), None);
        assert_eq!(intake.set_sender(Some(1)), Some(VideoGrant { client: 1, frames: 6, dropped: 0 }));
        intake
    }

    fn push(intake: &VideoIntake, client: u64, frames: std::ops::Range<u8>) {
        frames.for_each(|frame| assert_eq!(push_one(intake, client, frame), Ok(()), "frame {frame}"));
    }

    fn push_one(intake: &VideoIntake, client: u64, frame: u8) -> Result<(), FrameRefusal> {
        intake.push(client, Bytes::copy_from_slice(&[frame]))
    }

    fn take(intake: &VideoIntake, run: u32, frames: usize) -> (Vec<u8>, Option<VideoGrant>) {
        let (taken, grant) = intake.take_frames(run, frames).unwrap();
        (taken.concat(), grant)
    }

    fn grant(client: u64, frames: usize) -> Option<VideoGrant> {
        Some(VideoGrant { client, frames, dropped: 0 })
    }

    #[test]
    fn a_client_sends_two_chunks_ahead_and_no_frame_more() {
        let intake = intake();
        push(&intake, 1, 0..6);
        assert_eq!(push_one(&intake, 1, 6), Err(FrameRefusal::NoCredit));
        assert_eq!(intake.wait_for_chunk(1), Some(false));
        assert_eq!(take(&intake, 1, 2), (vec![0, 1], grant(1, 2)));
        push(&intake, 1, 6..8);
        assert_eq!(push_one(&intake, 1, 8), Err(FrameRefusal::NoCredit));
        assert_eq!(intake.wait_for_chunk(1), Some(false));
        // The leader cuts the scene, and one frame is left.
        assert_eq!(take(&intake, 1, 2), (vec![2, 3], grant(1, 2)));
        assert_eq!(intake.take_frames(1, 1), None);
        assert_eq!(intake.wait_for_chunk(1), Some(false));
        assert_eq!(take(&intake, 1, 3), (vec![4, 5, 6], grant(1, 3)));
    }

    #[test]
    fn frames_of_a_client_without_control_are_refused_and_spend_its_credits() {
        let intake = intake();
        assert_eq!(push_one(&intake, 2, 0), Err(FrameRefusal::NotInControl));
        push(&intake, 1, 0..1);
        assert_eq!(intake.set_sender(None), None);
        assert_eq!(push_one(&intake, 1, 1), Err(FrameRefusal::NotInControl));
        // One frame was discarded and one refused; four credits are left.
        assert_eq!(intake.set_sender(Some(1)), grant(1, 2));
        // Its next connection knows nothing of the credits.
        intake.forget_credits(1);
        push_after_return(&intake);
    }

    fn push_after_return(intake: &VideoIntake) {
        assert_eq!(push_one(intake, 1, 9), Err(FrameRefusal::NoCredit));
        assert_eq!(intake.set_sender(Some(1)), grant(1, 6));
        push(intake, 1, 0..6);
    }

    #[test]
    fn the_frames_of_the_next_client_begin_a_scene() {
        let intake = intake();
        push(&intake, 1, 0..6);
        assert_eq!(intake.wait_for_chunk(1), Some(false));
        take(&intake, 1, 2);
        assert_eq!(intake.wait_for_chunk(1), Some(false));
        // The control passes on while the leader takes a chunk: its chunk is complete, and the frame behind it is discarded.
        assert_eq!(intake.set_sender(Some(2)), grant(2, 6));
        push(&intake, 2, 10..12);
        assert_eq!(take(&intake, 1, 3), (vec![2, 3, 4], None));
        assert_eq!(intake.wait_for_chunk(1), Some(true));
        assert_eq!(take(&intake, 1, 2), (vec![10, 11], grant(2, 2)));
    }

    #[test]
    fn the_frames_of_the_next_client_begin_a_scene_even_if_no_chunk_was_taken_before() {
        let intake = intake();
        push(&intake, 1, 0..3);
        assert_eq!(intake.wait_for_chunk(1), Some(false));
        // The first chunk of the run is reserved and not handed out.
        assert_eq!(intake.set_sender(Some(2)), grant(2, 6));
        push(&intake, 2, 10..13);
        assert_eq!(take(&intake, 1, 2), (vec![0, 1], None));
        assert_eq!(intake.wait_for_chunk(1), Some(true));
        assert_eq!(take(&intake, 1, 2), (vec![10, 11], grant(2, 2)));
    }

    #[test]
    fn a_run_begins_without_the_frames_of_the_one_before() {
        let intake = intake();
        push(&intake, 1, 0..4);
        assert_eq!(intake.begin_run(2), Some(VideoGrant { client: 1, frames: 4, dropped: 4 }));
        assert_eq!((intake.wait_for_chunk(1), intake.take_frames(1, 0)), (None, None));
        push(&intake, 1, 4..6);
        assert_eq!(intake.wait_for_chunk(2), Some(false));
        assert_eq!(take(&intake, 2, 2), (vec![4, 5], grant(1, 2)));
    }

    #[test]
    fn the_wait_for_a_chunk_ends_with_its_frames_or_with_the_run() {
        let intake = intake();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| intake.wait_for_chunk(1));
            while !intake.is_waited_for(Instant::now(), Duration::ZERO) {
                std::thread::yield_now();
            }
            push(&intake, 1, 0..2);
            assert_eq!(waiting.join().unwrap(), Some(false));
            assert!(!intake.is_waited_for(Instant::now(), Duration::ZERO));
            take(&intake, 1, 2);
            let waiting = scope.spawn(|| intake.wait_for_chunk(1));
            push(&intake, 1, 2..4);
            intake.end_run();
            assert_eq!(waiting.join().unwrap(), None);
        });
    }
}
