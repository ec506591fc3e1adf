//! Which chunks of a run may be requested now, so that no chunk is generated long before it plays.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The pace of one run. Time is an argument, so that tests need no clock.
#[derive(Debug)]
pub(crate) struct Pacer {
    /// Chunks that are requested ahead of the one that plays.
    lead: u32,
    /// Frames per second.
    frame_rate: f64,
    /// Number of the first request that has not begun to play.
    next_to_play: u64,
    /// When each delivered chunk begins to play that has not begun, and its request; in order.
    scheduled: VecDeque<(Instant, u64)>,
    /// When the last delivered frame has played.
    played_until: Option<Instant>,
    /// The limit that was sent last.
    sent: u64,
    is_held: bool,
}

impl Pacer {
    /// Begins a run of which `lead` chunks are requested, at least one. `frame_rate` counts frames per second.
    pub(crate) fn new(lead: u32, frame_rate: f64) -> Pacer {
        Pacer::from_request(lead, frame_rate, 0)
    }

    /// Begins a run whose first requests are not played, and are requested at once.
    pub(crate) fn from_request(lead: u32, frame_rate: f64, first: u32) -> Pacer {
        let lead = lead.max(1);
        Pacer {
            lead,
            // A rate near 0 would make a chunk play for ever.
            frame_rate: frame_rate.max(0.1),
            next_to_play: u64::from(first),
            scheduled: VecDeque::new(),
            played_until: None,
            sent: u64::from(first.saturating_add(lead)),
            is_held: false,
        }
    }

    /// Returns the limit with which a run starts: the number of its chunks that may be requested.
    pub(crate) fn first_limit(&self) -> u32 {
        u32::try_from(self.sent).unwrap_or(u32::MAX)
    }

    /// Schedules the play of a delivered chunk behind the chunks before it.
    pub(crate) fn schedule(&mut self, now: Instant, request: u64, frames: u32) {
        let begins = self.played_until.map_or(now, |until| until.max(now));
        self.played_until = Some(begins + Duration::from_secs_f64(f64::from(frames) / self.frame_rate));
        self.scheduled.push_back((begins, request));
    }

    /// Notes that a client has taken a chunk, which counts as played.
    pub(crate) fn mark_taken(&mut self, request: u64) {
        self.scheduled.retain(|(_, scheduled)| *scheduled > request);
        self.next_to_play = self.next_to_play.max(request + 1);
    }

    /// Returns the first request that the limit holds back.
    pub(crate) fn first_held_request(&self) -> u64 {
        self.sent
    }

    /// Lets the next request pass that the limit holds back: a flush takes effect with it.
    pub(crate) fn admit_one(&mut self) {
        self.next_to_play = (self.sent + 1).saturating_sub(u64::from(self.lead));
    }

    /// Forgets the play of requests that a flush discarded: `request` is the first one after it.
    pub(crate) fn flush(&mut self, now: Instant, request: u64) {
        self.scheduled.retain(|(_, scheduled)| *scheduled >= request);
        self.next_to_play = self.next_to_play.max(request);
        self.played_until = Some(now);
    }

    /// Holds requests back, or lets them pass again.
    pub(crate) fn set_held(&mut self, is_held: bool) {
        self.is_held = is_held;
    }

    /// Returns a new limit that is to be sent now, and when to ask again.
    pub(crate) fn poll(&mut self, now: Instant) -> (Option<u32>, Option<Instant>) {
        while let Some((begins, request)) = self.scheduled.front().copied()
            && begins <= now
        {
            self.next_to_play = self.next_to_play.max(request + 1);
            self.scheduled.pop_front();
        }
        let next = self.scheduled.front().map(|(begins, _)| *begins);
        let limit = self.next_to_play + u64::from(self.lead);
        if self.is_held || limit <= self.sent {
            return (None, next);
        }
        self.sent = limit;
        (u32::try_from(limit).ok(), next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: Duration = Duration::from_millis(500);

    /// A pacer of 24 frames per second, whose chunks of 12 frames play for half a second.
    fn pacer(lead: u32) -> (Pacer, Instant) {
        (Pacer::new(lead, 24.0), Instant::now())
    }

    #[test]
    fn a_chunk_is_requested_when_the_one_before_the_lead_begins_to_play() {
        let (mut pacer, start) = pacer(2);
        assert_eq!((pacer.first_limit(), pacer.poll(start)), (2, (None, None)));
        pacer.schedule(start, 0, 12);
        pacer.schedule(start, 1, 12);
        let (limit, next) = pacer.poll(start);
        assert_eq!(limit, Some(3));
        let next = next.unwrap();
        assert!(next > start + CHUNK - Duration::from_millis(1) && next <= start + CHUNK);
        assert_eq!(pacer.poll(start + CHUNK / 2).0, None);
        assert_eq!(pacer.poll(next), (Some(4), None));
    }

    #[test]
    fn chunks_that_are_not_played_are_requested_at_once() {
        let start = Instant::now();
        let mut pacer = Pacer::from_request(2, 24.0, 40);
        assert_eq!((pacer.first_limit(), pacer.poll(start)), (42, (None, None)));
        pacer.schedule(start, 40, 12);
        assert_eq!(pacer.poll(start).0, Some(43));
    }

    #[test]
    fn a_late_chunk_plays_when_it_arrives() {
        let (mut pacer, start) = pacer(2);
        pacer.schedule(start, 0, 12);
        assert_eq!(pacer.poll(start).0, Some(3));
        pacer.schedule(start + 3 * CHUNK, 1, 12);
        assert_eq!(pacer.poll(start + 3 * CHUNK), (Some(4), None));
    }

    #[test]
    fn a_held_stream_requests_nothing_and_catches_up_later() {
        let (mut pacer, start) = pacer(2);
        pacer.set_held(true);
        pacer.schedule(start, 0, 12);
        pacer.schedule(start, 1, 12);
        assert_eq!(pacer.poll(start + 2 * CHUNK).0, None);
        pacer.set_held(false);
        assert_eq!(pacer.poll(start + 2 * CHUNK).0, Some(4));
    }

    #[test]
    fn a_client_that_takes_chunks_sets_the_pace() {
        let (mut pacer, start) = pacer(3);
        pacer.schedule(start, 0, 12);
        pacer.schedule(start, 1, 12);
        pacer.mark_taken(1);
        assert_eq!(pacer.poll(start), (Some(5), None));
    }

    #[test]
    fn a_flush_passes_the_limit_and_forgets_what_it_discards() {
        let (mut pacer, start) = pacer(2);
        pacer.schedule(start, 0, 12);
        assert_eq!(pacer.poll(start).0, Some(3));
        pacer.admit_one();
        assert_eq!(pacer.poll(start).0, Some(4));
        // The flush takes effect with request 3; requests 1 and 2 are never delivered.
        pacer.flush(start, 3);
        assert_eq!(pacer.poll(start).0, Some(5));
        pacer.schedule(start + CHUNK, 3, 12);
        assert_eq!(pacer.poll(start + CHUNK).0, Some(6));
    }
}
