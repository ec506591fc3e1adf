//! Which client controls the stream: one at a time, and none for long that is gone.

use std::time::{Duration, Instant};

/// For so long the control waits for a client whose connection was lost.
pub(crate) const RECONNECT_TIME: Duration = Duration::from_secs(10);

/// The control of the stream. Time is an argument, so that tests need no clock.
#[derive(Debug, Default)]
pub(crate) struct ControlLease {
    holder: Option<u64>,
    /// When the connection of the holder was lost.
    lost: Option<Instant>,
}

impl ControlLease {
    /// Returns the client in control.
    pub(crate) fn holder(&self, now: Instant) -> Option<u64> {
        let is_over = self.lost.is_some_and(|lost| now.saturating_duration_since(lost) >= RECONNECT_TIME);
        self.holder.filter(|_| !is_over)
    }

    /// Gives the control to a client if nobody has it. Returns whether the client has it now.
    pub(crate) fn take(&mut self, now: Instant, client: u64) -> bool {
        match self.holder(now) {
            Some(holder) => holder == client,
            None => {
                (self.holder, self.lost) = (Some(client), None);
                true
            }
        }
    }

    /// Takes the control from a client. Returns false if it had none.
    pub(crate) fn release(&mut self, client: u64) -> bool {
        let is_holder = self.holder == Some(client);
        if is_holder {
            *self = ControlLease::default();
        }
        is_holder
    }

    /// Hands the control over. Returns false if `from` has none.
    pub(crate) fn hand_over(&mut self, now: Instant, from: u64, to: u64) -> bool {
        let is_holder = self.holder(now) == Some(from);
        if is_holder {
            (self.holder, self.lost) = (Some(to), None);
        }
        is_holder
    }

    /// Notes that the connection of a client was lost.
    pub(crate) fn mark_lost(&mut self, now: Instant, client: u64) {
        if self.holder == Some(client) {
            self.lost = Some(now);
        }
    }

    /// Forgets a holder whose connection was lost. Returns whether there was one.
    pub(crate) fn forget_lost(&mut self) -> bool {
        let was_lost = self.lost.is_some();
        if was_lost {
            *self = ControlLease::default();
        }
        was_lost
    }

    /// Notes that a client is connected again.
    pub(crate) fn mark_connected(&mut self, client: u64) {
        if self.holder == Some(client) {
            self.lost = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_client_controls_until_it_releases_or_hands_over() {
        let (mut lease, now) = (ControlLease::default(), Instant::now());
        assert!(lease.take(now, 1) && lease.take(now, 1) && !lease.take(now, 2));
        assert!(!lease.release(2) && !lease.hand_over(now, 2, 3));
        assert!(lease.hand_over(now, 1, 2));
        assert_eq!(lease.holder(now), Some(2));
        assert!(lease.release(2) && lease.take(now, 3));
    }

    #[test]
    fn a_lost_client_keeps_the_control_for_a_while() {
        let (mut lease, now) = (ControlLease::default(), Instant::now());
        lease.take(now, 1);
        lease.mark_lost(now, 2);
        lease.mark_lost(now, 1);
        let (soon, late) = (now + RECONNECT_TIME / 2, now + RECONNECT_TIME);
        assert!(!lease.take(soon, 2));
        lease.mark_connected(1);
        assert_eq!(lease.holder(late), Some(1));
        lease.mark_lost(now, 1);
        assert!(lease.take(late, 2));
        lease.mark_connected(1);
        assert_eq!(lease.holder(late), Some(2));
    }
}
