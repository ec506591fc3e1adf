//! The cleaning of a prompt before it is tokenized.

use crate::fix_text::fix_text;

/// Cleans a prompt as the pipelines of Wan do: repairs its characters, decodes HTML entities twice,
/// and replaces each run of whitespace by one space.
///
/// The repair follows the documented steps of the Python library ftfy, without one: text that was
/// decoded in the wrong encoding ("Ã©" for "é") stays as it is, because it is recognised by
/// statistics that only that library defines.
#[must_use]
pub fn clean_prompt(prompt: &str) -> String {
    let fixed = fix_text(prompt);
    let once = htmlize::unescape(fixed.as_str());
    let twice = htmlize::unescape(once.as_ref());
    let words: Vec<&str> = twice.split(is_space).filter(|word| !word.is_empty()).collect();
    words.join(" ")
}

/// Whitespace of Python's `\s`, which also holds the four separators below the space.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entities_are_decoded_twice_and_spaces_collapse() {
        for (prompt, cleaned) in [
            ("  a\t\n b\u{3000}c\u{a0} ", "a b c"),
            ("&amp;amp; &amp;eacute;", "& é"),
            ("1 < 2 &hellip; it&#x2019;s", "1 < 2 … it’s"),
            ("it&#x2019;s &EACUTE; &notit;", "it's É ¬it;"),
            ("", ""),
        ] {
            assert_eq!(clean_prompt(prompt), cleaned, "{prompt:?}");
        }
    }
}
