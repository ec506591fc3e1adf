//! Just enough of Rust's lexical rules to tell code from comments and literals, and tests from the rest.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::tree::{Tree, crate_of};

/// A source in three views of equal length, so that an offset means the same place in all.
#[derive(Debug)]
pub(super) struct Source<'a> {
    pub(super) path: &'a str,
    /// As it is.
    pub(super) text: &'a str,
    /// Comments and the contents of literals blanked.
    pub(super) code: String,
    /// Comments blanked.
    pub(super) uncommented: String,
    /// Code that only tests see.
    tests: Vec<Range<usize>>,
}

impl Source<'_> {
    /// Line of an offset, from 1.
    pub(super) fn line(&self, offset: usize) -> usize {
        self.text.as_bytes()[..offset].iter().filter(|b| **b == b'\n').count() + 1
    }

    /// Whether only tests see an offset.
    pub(super) fn in_test(&self, offset: usize) -> bool {
        self.tests.iter().any(|r| r.contains(&offset))
    }

    /// The crate it belongs to.
    pub(super) fn crate_name(&self) -> &str {
        crate_of(self.path).unwrap_or_default()
    }
}

/// Every source of the tree.
pub(super) fn sources(tree: &Tree) -> Vec<Source<'_>> {
    let mut out: Vec<Source<'_>> = tree.sources().map(|f| source(&f.path, &f.text)).collect();
    // A module of tests may be a file of its own, declared in its parent.
    let apart: BTreeSet<String> = out.iter().flat_map(test_modules).collect();
    for s in &mut out {
        let inside_src = s.path.split('/').nth(2) == Some("src");
        if !inside_src
            || apart.iter().any(|a| s.path == format!("{a}.rs") || s.path.starts_with(&format!("{a}/")))
        {
            s.tests = std::iter::once(0..s.text.len()).collect();
        }
    }
    out
}

/// One source.
pub(super) fn source<'a>(path: &'a str, text: &'a str) -> Source<'a> {
    let (code, uncommented) = mask(text);
    let tests = test_ranges(&code);
    Source { path, text, code, uncommented, tests }
}

/// Offsets at which `word` stands as a whole word.
pub(super) fn words<'t>(code: &'t str, word: &'t str) -> impl Iterator<Item = usize> + 't {
    code.match_indices(word).map(|(at, _)| at).filter(move |at| {
        let before = code[..*at].chars().next_back();
        let after = code[at + word.len()..].chars().next();
        !before.is_some_and(in_name) && !after.is_some_and(in_name)
    })
}

/// One past the bracket that closes the one at `open`.
pub(super) fn closing(code: &str, open: usize) -> usize {
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

fn in_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// (comments and contents of literals blanked, comments blanked).
fn mask(text: &str) -> (String, String) {
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
            let end = block_comment(bytes, i);
            blank(&mut code, i..end);
            blank(&mut uncommented, i..end);
            i = end;
        } else if let Some((open, close, end)) = literal(text, i) {
            blank(&mut code, open..close);
            i = end;
        } else if in_name(rest[0] as char) {
            // A whole word at once, so that the `r` of `for"` opens no raw string.
            i += rest.iter().take_while(|b| in_name(**b as char) || **b >= 0x80).count().max(1);
        } else {
            i += 1;
        }
    }
    // Only whole characters were blanked, so both are still UTF-8.
    (String::from_utf8_lossy(&code).into_owned(), String::from_utf8_lossy(&uncommented).into_owned())
}

fn block_comment(bytes: &[u8], start: usize) -> usize {
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

/// A string or character literal at `i`: where its contents begin and end, and where it ends.
fn literal(text: &str, i: usize) -> Option<(usize, usize, usize)> {
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
        // 'a' and '\n' are characters, 'a is a lifetime.
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

/// Items under `#[cfg(test)]`.
fn test_ranges(code: &str) -> Vec<Range<usize>> {
    if code.contains("#![cfg(test)]") {
        return std::iter::once(0..code.len()).collect();
    }
    ["#[cfg(test)]", "#[cfg(all(test"]
        .iter()
        .flat_map(|attribute| code.match_indices(attribute))
        .map(|(at, _)| at..item_end(code, closing(code, at + 1)))
        .collect()
}

/// Where an item that begins at or after `from` ends.
fn item_end(code: &str, from: usize) -> usize {
    let bytes = code.as_bytes();
    let mut i = from;
    loop {
        i += code[i..].len() - code[i..].trim_start().len();
        if !code[i..].starts_with("#[") {
            break;
        }
        i = closing(code, i + 1);
    }
    let to_semicolon = ["use ", "const ", "static ", "type "].iter().any(|k| {
        let item = &code[i..];
        let item = item.strip_prefix("pub ").or_else(|| item.strip_prefix("pub(crate) ")).unwrap_or(item);
        item.starts_with(k) && !item.starts_with("const fn")
    });
    while i < bytes.len() {
        match bytes[i] {
            b';' => return i + 1,
            b'{' if !to_semicolon => return closing(code, i),
            b'{' | b'(' | b'[' => i = closing(code, i),
            _ => i += 1,
        }
    }
    code.len()
}

/// Paths, without `.rs`, of the modules that a source declares for tests alone.
fn test_modules(s: &Source<'_>) -> Vec<String> {
    let folder = match s.path.rsplit_once('/') {
        Some((folder, "lib.rs" | "main.rs" | "mod.rs")) => folder,
        _ => s.path.trim_end_matches(".rs"),
    };
    let declared = |r: &Range<usize>| {
        let item = s.code[r.clone()].rsplit("mod ").next()?.trim();
        let name = item.strip_suffix(';')?.trim();
        name.chars().all(in_name).then(|| format!("{folder}/{name}"))
    };
    s.tests.iter().filter_map(declared).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_told_from_code() {
        let text = "fn a<'x>() { b('\"', '\\'', \"un\\\"safe // no\", r#\"x \" y\"#); } // unsafe\n/* a /* b */ c */ d";
        let (code, uncommented) = mask(text);
        assert_eq!(code.len(), text.len());
        assert!(!code.contains("safe") && !code.contains("no") && !code.contains("x \""));
        assert!(code.contains("fn a<'x>()") && code.contains("); }") && code.trim_end().ends_with('d'));
        assert!(!code.contains('c') && uncommented.contains("un\\\"safe // no"));
        assert!(!uncommented.contains("// unsafe"));
    }

    #[test]
    fn words_are_whole() {
        let at: Vec<usize> = words("unsafe unsafe_code not_unsafe (unsafe)", "unsafe").collect();
        assert_eq!(at, [0, 31]);
    }

    #[test]
    fn items_for_tests_are_found_inside_and_apart() {
        let text = "fn a() {}\n#[cfg(test)]\n#[allow(x)]\nmod tests { fn b() {} }\nfn c() {}\n#[cfg(test)]\nuse x::{y, z};\nfn d() {}\n";
        let s = source("crates/a/src/lib.rs", text);
        for (name, inside) in
            [("fn a", false), ("fn b", true), ("fn c", false), ("y, z", true), ("fn d", false)]
        {
            assert_eq!(s.in_test(text.find(name).unwrap()), inside, "{name}");
        }
        let tree = Tree::of(&[
            ("crates/a/src/lib.rs", "//! .\n#[cfg(test)]\nmod proofs;\n"),
            ("crates/a/src/proofs.rs", "fn p() {}"),
            ("crates/a/src/parse.rs", "#[cfg(test)]\nmod tests;\n"),
            ("crates/a/src/parse/tests.rs", "fn q() {}"),
            ("crates/a/src/other.rs", "fn r() {}"),
            ("crates/a/tests/t.rs", "fn s() {}"),
        ]);
        let all: Vec<bool> = sources(&tree).iter().map(|s| s.in_test(0)).collect();
        assert_eq!(all, [false, true, true, true, false, true]);
    }
}
