//! A minimal Rust lexer that separates code from comments and literals, and test code from other
//! code.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::tree::{Tree, owning_crate};

/// A source in three views of equal length, so that one offset denotes the same place in all three.
#[derive(Debug)]
pub(super) struct Source<'a> {
    pub(super) path: &'a str,
    /// The source as it is in the file, with comments and literals.
    pub(super) text: &'a str,
    /// The text with comments and the contents of literals replaced by spaces.
    pub(super) code: String,
    /// The text with comments replaced by spaces.
    pub(super) uncommented: String,
    /// Ranges of code that is compiled for tests only.
    test_ranges: Vec<Range<usize>>,
}

impl Source<'_> {
    /// Returns the line number of an offset, from 1.
    pub(super) fn line_number(&self, offset: usize) -> usize {
        self.text.as_bytes()[..offset].iter().filter(|b| **b == b'\n').count() + 1
    }

    /// Returns whether the code at an offset is compiled for tests only.
    pub(super) fn in_test(&self, offset: usize) -> bool {
        self.test_ranges.iter().any(|r| r.contains(&offset))
    }

    /// Returns the name of the crate that contains the source.
    pub(super) fn crate_name(&self) -> &str {
        owning_crate(self.path).unwrap_or_default()
    }
}

/// Parses every Rust source of the tree.
pub(super) fn parse_sources(tree: &Tree) -> Vec<Source<'_>> {
    let mut out: Vec<Source<'_>> = tree.rust_files().map(|f| parse_source(&f.path, &f.text)).collect();
    // A test module may be a separate file that its parent declares.
    let test_files: BTreeSet<String> = out.iter().flat_map(declared_test_modules).collect();
    for s in &mut out {
        let inside_src = s.path.split('/').nth(2) == Some("src");
        if !inside_src
            || test_files.iter().any(|a| s.path == format!("{a}.rs") || s.path.starts_with(&format!("{a}/")))
        {
            s.test_ranges = std::iter::once(0..s.text.len()).collect();
        }
    }
    out
}

/// Builds the three views of a source and finds its test-only ranges.
pub(super) fn parse_source<'a>(path: &'a str, text: &'a str) -> Source<'a> {
    let (code, uncommented) = mask_text(text);
    let test_ranges = find_test_ranges(&code);
    Source { path, text, code, uncommented, test_ranges }
}

/// Finds the offsets at which `word` occurs as a whole word.
pub(super) fn find_words<'t>(code: &'t str, word: &'t str) -> impl Iterator<Item = usize> + 't {
    code.match_indices(word).map(|(at, _)| at).filter(move |at| {
        let before = code[..*at].chars().next_back();
        let after = code[at + word.len()..].chars().next();
        !before.is_some_and(is_name_char) && !after.is_some_and(is_name_char)
    })
}

/// Returns the offset behind the bracket that closes the one at `open`.
pub(super) fn closing_bracket(code: &str, open: usize) -> usize {
    let mut depth = 0usize;
    for (i, b) in code.bytes().enumerate().skip(open) {
        match b {
            b'{' | b'(' | b'[' => depth += 1,
            b'}' | b')' | b']' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return i + 1;
                }
            }
            _ => {}
        }
    }
    code.len()
}

fn is_name_char(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns the views [`Source::code`] and [`Source::uncommented`] of a text.
fn mask_text(text: &str) -> (String, String) {
    let bytes = text.as_bytes();
    let (mut code, mut uncommented) = (bytes.to_vec(), bytes.to_vec());
    let blank = |to: &mut [u8], range: Range<usize>| {
        to[range].iter_mut().filter(|b| **b != b'\n').for_each(|b| *b = b' ');
    };
    let mut i = 0;
    while i < bytes.len() {
        let rest = &bytes[i..];
        if rest.starts_with(b"//") {
            let end = text[i..].find('\n').map_or(bytes.len(), |n| i + n);
            blank(&mut code, i..end);
            blank(&mut uncommented, i..end);
            i = end;
        } else if rest.starts_with(b"/*") {
            let end = block_comment_end(bytes, i);
            blank(&mut code, i..end);
            blank(&mut uncommented, i..end);
            i = end;
        } else if let Some((open, close, end)) = find_literal(text, i) {
            blank(&mut code, open..close);
            i = end;
        } else if is_name_char(rest[0] as char) {
            // Skip a whole word at once, so that the `r` of `for"` does not open a raw string.
            i += rest.iter().take_while(|b| is_name_char(**b as char) || **b >= 0x80).count().max(1);
        } else {
            i += 1;
        }
    }
    // Only whole characters were replaced, so both views are still valid UTF-8.
    (String::from_utf8_lossy(&code).into_owned(), String::from_utf8_lossy(&uncommented).into_owned())
}

/// Returns the offset behind the block comment, possibly nested, that begins at `start`.
fn block_comment_end(bytes: &[u8], start: usize) -> usize {
    let (mut depth, mut i) = (0usize, start);
    while i < bytes.len() {
        match &bytes[i..] {
            [b'/', b'*', ..] => (depth, i) = (depth + 1, i + 2),
            [b'*', b'/', ..] => {
                (depth, i) = (depth - 1, i + 2);
                if depth == 0 {
                    return i;
                }
            }
            _ => i += 1,
        }
    }
    bytes.len()
}

/// Finds a string or character literal at `i` and returns the start and end of its contents and the
/// end of the literal.
fn find_literal(text: &str, i: usize) -> Option<(usize, usize, usize)> {
    let rest = &text[i..];
    let prefix = ["br", "cr", "r", "b", "c", ""].into_iter().find(|p| {
        rest.strip_prefix(p).is_some_and(|r| match p.ends_with('r') {
            true => r.trim_start_matches('#').starts_with('"'),
            false => r.starts_with('"') || (r.starts_with('\'') && *p != "c"),
        })
    })?;
    let after = &rest[prefix.len()..];
    if prefix.ends_with('r') {
        let hashes = after.len() - after.trim_start_matches('#').len();
        let open = i + prefix.len() + hashes + 1;
        let end = format!("\"{}", "#".repeat(hashes));
        let close = text[open..].find(&end).map_or(text.len(), |n| open + n);
        return Some((open, close, (close + end.len()).min(text.len())));
    }
    let quote = after.chars().next()?;
    let open = i + prefix.len() + 1;
    if quote == '\'' {
        // `'a'` and `'\n'` are characters; `'a` is a lifetime.
        let mut chars = text[open..].chars();
        let first = chars.next()?;
        if first != '\\' && chars.next() != Some('\'') {
            return None;
        }
    }
    let mut escaped = false;
    for (n, c) in text[open..].char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return Some((open, open + n, open + n + 1)),
            _ => {}
        }
    }
    Some((open, text.len(), text.len()))
}

/// Finds the items under `#[cfg(test)]`.
fn find_test_ranges(code: &str) -> Vec<Range<usize>> {
    if code.contains("#![cfg(test)]") {
        return std::iter::once(0..code.len()).collect();
    }
    ["#[cfg(test)]", "#[cfg(all(test"]
        .iter()
        .flat_map(|attribute| code.match_indices(attribute))
        .map(|(at, _)| at..item_end(code, closing_bracket(code, at + 1)))
        .collect()
}

/// Returns the end of the item that begins at or after `from`.
fn item_end(code: &str, from: usize) -> usize {
    let bytes = code.as_bytes();
    let mut i = from;
    loop {
        i += code[i..].len() - code[i..].trim_start().len();
        if !code[i..].starts_with("#[") {
            break;
        }
        i = closing_bracket(code, i + 1);
    }
    let ends_at_semicolon = ["use ", "const ", "static ", "type "].iter().any(|k| {
        let item = &code[i..];
        let item = item.strip_prefix("pub ").or_else(|| item.strip_prefix("pub(crate) ")).unwrap_or(item);
        item.starts_with(k) && !item.starts_with("const fn")
    });
    while i < bytes.len() {
        match bytes[i] {
            b';' => return i + 1,
            b'{' if !ends_at_semicolon => return closing_bracket(code, i),
            b'{' | b'(' | b'[' => i = closing_bracket(code, i),
            _ => i += 1,
        }
    }
    code.len()
}

/// Lists the paths, without `.rs`, of the modules that a source declares for tests only.
fn declared_test_modules(s: &Source<'_>) -> Vec<String> {
    let folder = match s.path.rsplit_once('/') {
        Some((folder, "lib.rs" | "main.rs" | "mod.rs")) => folder,
        _ => s.path.trim_end_matches(".rs"),
    };
    let declared = |r: &Range<usize>| {
        let item = s.code[r.clone()].rsplit("mod ").next()?.trim();
        let name = item.strip_suffix(';')?.trim();
        name.chars().all(is_name_char).then(|| format!("{folder}/{name}"))
    };
    s.test_ranges.iter().filter_map(declared).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_separated_from_code() {
        let text = "fn a<'x>() { b('\"', '\\'', \"un\\\"safe // no\", r#\"x \" y\"#); } // unsafe\n/* a /* b */ c */ d";
        let (code, uncommented) = mask_text(text);
        assert_eq!(code.len(), text.len());
        assert!(!code.contains("safe") && !code.contains("no") && !code.contains("x \""));
        assert!(code.contains("fn a<'x>()") && code.contains("); }") && code.trim_end().ends_with('d'));
        assert!(!code.contains('c') && uncommented.contains("un\\\"safe // no"));
        assert!(!uncommented.contains("// unsafe"));
    }

    #[test]
    fn only_whole_words_are_found() {
        let at: Vec<usize> = find_words("unsafe unsafe_code not_unsafe (unsafe)", "unsafe").collect();
        assert_eq!(at, [0, 31]);
    }

    #[test]
    fn test_items_are_found_inline_and_in_separate_files() {
        let text = "fn a() {}\n#[cfg(test)]\n#[allow(x)]\nmod tests { fn b() {} }\nfn c() {}\n#[cfg(test)]\nuse x::{y, z};\nfn d() {}\n";
        let s = parse_source("crates/a/src/lib.rs", text);
        for (name, inside) in
            [("fn a", false), ("fn b", true), ("fn c", false), ("y, z", true), ("fn d", false)]
        {
            assert_eq!(s.in_test(text.find(name).unwrap()), inside, "{name}");
        }
        let tree = Tree::from_files(&[
            ("crates/a/src/lib.rs", "//! .\n#[cfg(test)]\nmod proofs;\n"),
            ("crates/a/src/proofs.rs", "fn p() {}"),
            ("crates/a/src/parse.rs", "#[cfg(test)]\nmod tests;\n"),
            ("crates/a/src/parse/tests.rs", "fn q() {}"),
            ("crates/a/src/other.rs", "fn r() {}"),
            ("crates/a/tests/t.rs", "fn s() {}"),
        ]);
        let all: Vec<bool> = parse_sources(&tree).iter().map(|s| s.in_test(0)).collect();
        assert_eq!(all, [false, true, true, true, false, true]);
    }
}
