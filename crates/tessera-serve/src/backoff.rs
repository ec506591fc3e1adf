//! The waits between attempts that fail, of runs and of requests to a collector.

use std::time::Duration;

/// Wait after the first failure; each further one in a row waits twice as long.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// Longest wait between two attempts.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Returns how long to wait after so many failures in a row, from 1.
pub(crate) fn wait_after(failures: u32) -> Duration {
    (FIRST_WAIT * 2_u32.saturating_pow(failures.saturating_sub(1))).min(LONGEST_WAIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_failure_doubles_the_wait_up_to_a_limit() {
        let seconds = [1, 2, 3, 5, 6, 40, u32::MAX].map(|failures| wait_after(failures).as_secs());
        assert_eq!(seconds, [1, 2, 4, 16, 30, 30, 30]);
    }
}
