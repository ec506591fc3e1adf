//! Text of pages and drawings: replacement of control characters, images as data URIs, counts and
//! command lines.

use base64::{Engine, prelude::BASE64_STANDARD};

/// Replaces the control characters that HTML and XML cannot represent.
pub(crate) fn replace_control_chars(s: String) -> String {
    let is_refused = |c: char| c.is_control() && c != '\n' && c != '\t';
    if s.contains(is_refused) { s.replace(is_refused, "\u{fffd}") } else { s }
}

/// Encodes a PNG file as a data URI, which loads without a network.
pub(crate) fn png_uri(png: &[u8]) -> String {
    format!("data:image/png;base64,{}", BASE64_STANDARD.encode(png))
}

/// Formats a value, or a dash if there is none.
pub(crate) fn format_or_dash(value: Option<impl ToString>) -> String {
    value.map_or("–".to_string(), |v| v.to_string())
}

/// Formats a command line for a shell; puts words that a shell would split or expand in single
/// quotes.
pub(crate) fn format_shell_command(words: &[String]) -> String {
    let quoted: Vec<String> = words
        .iter()
        .map(|w| {
            let safe = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
            if !w.is_empty() && w.chars().all(safe) {
                w.clone()
            } else {
                format!("'{}'", w.replace('\'', r"'\''"))
            }
        })
        .collect();
    quoted.join(" ")
}

/// Formats a share of 1 in per cent, such as `12.5 %`.
pub(crate) fn format_percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Formats a count with narrow spaces between groups of three digits.
pub(crate) fn format_count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push('\u{202f}');
        }
        out.push(c);
    }
    out
}

/// Formats a count with its noun: `1 chunk`, `12 chunks`.
pub(crate) fn format_plural(n: u64, word: &str) -> String {
    format!("{} {word}{}", format_count(n), if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_replaced() {
        assert_eq!(replace_control_chars("a\u{0}\r\n\tb".into()), "a\u{fffd}\u{fffd}\n\tb");
    }

    #[test]
    fn images_are_padded_base64() {
        assert_eq!(png_uri(b"fooba"), "data:image/png;base64,Zm9vYmE=");
        assert_eq!(png_uri(&[0xfb, 0xff]), "data:image/png;base64,+/8=");
    }

    #[test]
    fn commands_survive_a_shell() {
        let words = ["tessera", "--prompt", "a cat's \"tail\"", "", "tp=2,pp=1"].map(String::from);
        assert_eq!(format_shell_command(&words), r#"tessera --prompt 'a cat'\''s "tail"' '' tp=2,pp=1"#);
    }

    #[test]
    fn counts_and_plurals() {
        assert_eq!(format_count(1_234_567), "1\u{202f}234\u{202f}567");
        assert_eq!(
            (format_plural(1, "chunk"), format_plural(0, "frame")),
            ("1 chunk".into(), "0 frames".into())
        );
    }
}
