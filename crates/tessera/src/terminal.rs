//! Messages of a process to its standard error, which survive a closed pipe and a full disk.

use std::borrow::Cow;
use std::io::Write;

/// Writes text to standard error as it is. The write may fail: a message must not end a run, and
/// there is no other channel on which to report the failure. `eprint!` panics instead.
pub fn print_stderr(text: &str) {
    let _ = std::io::stderr().lock().write_all(escape_controls(text).as_bytes());
}

/// Writes a line to standard error, as [`print_stderr`] does.
pub fn print_stderr_line(line: &str) {
    // One write, so that lines of several processes do not mix.
    print_stderr(&format!("{line}\n"));
}

/// Replaces control characters except line breaks and tabs by escapes such as `\u{1b}`. A path or a
/// prompt that contains them could otherwise change what a terminal shows.
#[must_use]
pub fn escape_controls(text: &str) -> Cow<'_, str> {
    let harmless = |c: char| !c.is_control() || matches!(c, '\n' | '\t');
    if text.chars().all(harmless) {
        return Cow::Borrowed(text);
    }
    let escape = |c: char| if harmless(c) { c.to_string() } else { c.escape_unicode().to_string() };
    Cow::Owned(text.chars().map(escape).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controls_are_escaped_and_other_text_is_kept() {
        assert!(matches!(escape_controls("naïve\n\t→ 1"), Cow::Borrowed("naïve\n\t→ 1")));
        assert_eq!(escape_controls("a\u{1b}[2Jb\r\u{9b}"), "a\\u{1b}[2Jb\\u{d}\\u{9b}");
    }
}
