//! The rule by which the page of `tessera serve` shows frames, for clients that are no browser.
//!
//! It is `PlayOut` of `crates/tessera-serve/page/stream.js`, which says the reasons. Both are tested with the cases of
//! `crates/tessera-serve/tests/page/play_out.json`, so a change of one fails the test of the other.

/// Most that the clock of the play-out departs from that of the model.
const CLOCK_CORRECTION: f64 = 0.01;
/// Share of a new depth in the mean depth.
const DEPTH_SHARE: f64 = 0.1;
/// Longest time for which the first frame of a chunk waits before the play begins.
const LONGEST_RESERVE_MS: f64 = 250.0;
/// Chunks within which two stalls show that the ranks are slower than the video.
const STALL_CHUNKS: u64 = 64;
/// Chunks that a stall lasts at most; what lasts longer is a pause.
const PAUSE_CHUNKS: f64 = 8.0;
/// How much faster the play becomes with each chunk while the ranks prove faster than it.
const RECOVERY: f64 = 1.05;
/// Slowest play, as a share of the frame rate.
const SLOWEST: f64 = 0.02;

/// Decides when each frame of one client is shown. Times are milliseconds on any one clock.
#[derive(Debug)]
pub struct PlayOut {
    frame_ms: f64,
    chunk_frames: f64,
    reserve_ms: f64,
    due: f64,
    is_playing: bool,
    depth: f64,
    share: f64,
    chunks: u64,
    empty_since: Option<f64>,
    /// Time and number of the chunk that ended the last stall.
    last_stall: Option<(f64, u64)>,
    stalls: u64,
}

/// What is to be done with the frames that wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// Frames at the front that are never shown, because the time of later ones has come.
    pub skipped: usize,
    /// Whether the next frame is shown now.
    pub shows: bool,
}

impl PlayOut {
    /// Creates the play-out of a client that has no frame.
    pub fn new(frame_rate: f64, chunk_frames: u32) -> PlayOut {
        let frame_ms = 1000.0 / frame_rate;
        let chunk_frames = f64::from(chunk_frames);
        let reserve_ms = ((chunk_frames * frame_ms) / 2.0).min(LONGEST_RESERVE_MS);
        PlayOut {
            frame_ms,
            chunk_frames,
            reserve_ms,
            due: 0.0,
            is_playing: false,
            depth: reserve_ms / frame_ms,
            share: 1.0,
            chunks: 0,
            empty_since: None,
            last_stall: None,
            stalls: 0,
        }
    }

    /// Notes the arrival of a frame, before which `waiting` frames wait.
    pub fn arrive(&mut self, is_first: bool, waiting: usize, now: f64) {
        let reserve = self.reserve_ms / self.frame_ms;
        let waiting = waiting as f64;
        if is_first {
            self.chunks += 1;
            if self.is_playing {
                self.depth += DEPTH_SHARE * (waiting - self.depth);
            }
            if waiting > reserve + self.chunk_frames {
                self.share = (self.share * RECOVERY).min(1.0);
            }
        }
        if self.is_playing {
            return;
        }
        if let Some(since) = self.empty_since.take() {
            self.end_stall(since, now);
        }
        self.is_playing = true;
        self.depth = reserve;
        self.due = now + self.reserve_ms;
    }

    /// Returns what to do with the frames that wait.
    pub fn take(&mut self, waiting: usize, now: f64) -> Taken {
        let interval = self.interval_ms();
        if !self.is_playing || waiting == 0 {
            if self.is_playing && now > self.due + interval / 2.0 {
                self.is_playing = false;
                self.empty_since = Some(self.due);
                self.stalls += 1;
            }
            return Taken { skipped: 0, shows: false };
        }
        let late = ((now - self.due) / interval - self.chunk_frames / 2.0).floor();
        let skipped = (late.max(0.0) as usize).min(waiting - 1);
        self.drop_frames(skipped, now);
        let shows = now >= self.due;
        if shows {
            self.due += interval;
        }
        Taken { skipped, shows }
    }

    /// Notes that so many frames at the front are not shown. Their time passes all the same, but not beyond now.
    pub fn drop_frames(&mut self, frames: usize, now: f64) {
        let due = (self.due + frames as f64 * self.interval_ms()).min(now);
        self.due = self.due.max(due);
        if frames > 0 {
            self.depth = self.reserve_ms / self.frame_ms;
        }
    }

    /// Returns when the next frame is due, and `None` before the first one and in a stall.
    pub fn due_ms(&self) -> Option<f64> {
        self.is_playing.then_some(self.due)
    }

    /// Returns how often a frame was due and none waited.
    pub fn stalls(&self) -> u64 {
        self.stalls
    }

    fn interval_ms(&self) -> f64 {
        let reserve = self.reserve_ms / self.frame_ms;
        let error = ((self.depth - reserve) / reserve).clamp(-1.0, 1.0);
        self.frame_ms / (self.share * (1.0 + CLOCK_CORRECTION * error))
    }

    fn end_stall(&mut self, since: f64, now: f64) {
        let chunk_ms = self.chunk_frames * self.frame_ms;
        let is_pause = now - since > PAUSE_CHUNKS * chunk_ms;
        if let Some((at, chunk)) = self.last_stall
            && !is_pause
            && self.chunks - chunk <= STALL_CHUNKS
        {
            let share = ((self.chunks - chunk) as f64 * chunk_ms) / (now - at);
            self.share = share.clamp(SLOWEST, 1.0);
        }
        self.last_stall = (!is_pause).then_some((now, self.chunks));
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    /// Chunks of twelve frames at 24 frames per second, and when each frame is shown.
    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Case {
        name: String,
        arrivals: Vec<f64>,
        end_ms: u32,
        tick_ms: u32,
        shown: Vec<u32>,
        skipped: usize,
        stalls: u64,
    }

    fn play(case: &Case) -> (Vec<u32>, usize, u64) {
        const CHUNK_FRAMES: usize = 12;
        let mut play_out = PlayOut::new(24.0, CHUNK_FRAMES as u32);
        let (mut shown, mut waiting, mut skipped) = (Vec::new(), 0, 0);
        let mut arrivals = case.arrivals.iter().peekable();
        for now in (0..=case.end_ms).step_by(case.tick_ms as usize) {
            while let Some(at) = arrivals.next_if(|at| **at <= f64::from(now)) {
                for frame in 0..CHUNK_FRAMES {
                    play_out.arrive(frame == 0, waiting, *at);
                    waiting += 1;
                    if waiting > 3 * CHUNK_FRAMES {
                        play_out.drop_frames(1, *at);
                        (waiting, skipped) = (waiting - 1, skipped + 1);
                    }
                }
            }
            let taken = play_out.take(waiting, f64::from(now));
            waiting -= taken.skipped + usize::from(taken.shows);
            skipped += taken.skipped;
            if taken.shows {
                shown.push(now);
            }
        }
        (shown, skipped, play_out.stalls())
    }

    #[test]
    fn frames_are_shown_when_the_page_shows_them() {
        let text = include_str!("../../../tessera-serve/tests/page/play_out.json");
        let cases: Vec<Case> = serde_json::from_str(text).expect("the shared cases");
        assert!(cases.len() >= 3 && cases.iter().any(|case| case.stalls > 1));
        for case in &cases {
            assert_eq!(play(case), (case.shown.clone(), case.skipped, case.stalls), "{}", case.name);
        }
    }

    #[test]
    fn a_play_out_without_frames_waits() {
        let mut play_out = PlayOut::new(24.0, 12);
        assert_eq!((play_out.due_ms(), play_out.take(0, 1e6).shows), (None, false));
        play_out.arrive(true, 0, 1e6);
        assert_eq!((play_out.due_ms(), play_out.stalls()), (Some(1e6 + 250.0), 0));
    }
}
