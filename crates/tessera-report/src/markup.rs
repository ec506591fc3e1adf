//! Escaping of text for HTML and encoding of images as data URIs. All text from users or peers
//! passes through [`escape_text`].

/// Escapes text for element content and for attributes in either kind of quotes.
pub(crate) fn escape_text(s: &str) -> String {
    let mut out = String::with_capacity(s.len());
    for c in s.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(c),
            // HTML cannot represent most control characters.
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// Encodes a PNG file as a data URI, which loads without a network.
pub(crate) fn png_uri(png: &[u8]) -> String {
    format!("data:image/png;base64,{}", encode_base64(png))
}

/// Formats a command line with shell quoting.
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

fn encode_base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let at = |i: usize| u32::from(three.get(i).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for i in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * i)) as usize & 63];
            out.push(if i <= three.len() { digit as char } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        assert_eq!(
            escape_text("<a b='c' d=\"e\">&\u{0}\n"),
            "&lt;a b=&#39;c&#39; d=&quot;e&quot;&gt;&amp;\u{fffd}\n"
        );
    }

    #[test]
    fn base64_matches_the_standard() {
        for (raw, coded) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(encode_base64(raw.as_bytes()), coded);
        }
        assert_eq!(encode_base64(&[0xfb, 0xff]), "+/8=");
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
