//! The two clocks of this host that runs and their records use.

use rustix::time::{ClockId, clock_gettime};

/// Returns the time of the monotonic clock, which all processes of a host share, in nanoseconds.
pub fn monotonic_ns() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap_or(0)
}

/// Formats seconds since 1970 as `2026-11-20T23:51:00Z`.
#[must_use]
pub fn format_utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Converts days to a civil date by eras of 400 years that begin on 1 March.
    let z = days + 719_468;
    let (era, day) = (z / 146_097, z % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{date:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

/// Parses what [`format_utc`] writes, in seconds since 1970; `None` for any other text.
#[must_use]
pub fn parse_utc(text: &str) -> Option<u64> {
    let mut fields = [0u64; 6];
    for (field, digits) in fields.iter_mut().zip(text.split(['-', 'T', ':', 'Z'])) {
        *field = digits.parse().ok()?;
    }
    let [year, month, date, hours, minutes, seconds] = fields;
    // Years begin on 1 March, so that a leap day is the last day of its year.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year.checked_sub(1)?, month + 9) };
    let days = 365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + date;
    let seconds = days.checked_sub(719_469)? * 86_400 + hours * 3600 + minutes * 60 + seconds;
    (format_utc(seconds) == text).then_some(seconds)
}

#[cfg(test)]
mod tests {
    use super::{format_utc, parse_utc};

    #[test]
    fn dates_read_back_as_instants_and_nothing_else_does() {
        for seconds in [0, 951_782_399, 951_782_400, 951_868_800, 1_795_219_261, 4_107_542_400] {
            assert_eq!(parse_utc(&format_utc(seconds)), Some(seconds));
        }
        for text in
            ["", "on a simulated clock", "2026-02-30T00:00:00Z", "2026-11-21T00:00:00", "9-9-9T9:9:9Z"]
        {
            assert_eq!(parse_utc(text), None, "{text}");
        }
    }

    #[test]
    fn instants_read_as_dates() {
        assert_eq!(format_utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(format_utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(format_utc(1_795_219_200), "2026-11-21T00:00:00Z");
    }
}
