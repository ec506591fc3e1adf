//! The words and phrases that `docs/glossary.md` bans, looked for in every page and every source.
//!
//! The glossary itself is the list: the third column of its table names what not to write, so a new
//! ban is an edit of the page that people read.

use super::Problem;
use super::page::{GLOSSARY, Row, marked_rows};
use crate::tree::{File, Tree};

/// A phrase of the column *do not write*.
#[derive(Debug)]
struct BannedPhrase {
    /// The phrase in lower case, as it has to be written in prose.
    phrase: String,
    /// Longer phrases of the field that contain it and stay allowed, such as *dot product*.
    allowed_within: Vec<String>,
    /// The term of the first column of the same row.
    preferred: String,
}

/// Reports each banned phrase with the term that the glossary prefers.
pub(super) fn check(tree: &Tree, found: &mut Vec<Problem>) {
    let banned = read_glossary(tree, found);
    for file in tree.files.iter().filter(|f| is_checked(&f.path)) {
        for (line, phrase) in find_banned(file, &banned) {
            let message = format!(
                "\"{}\" is on the glossary's list of words to avoid: write {}",
                phrase.phrase, phrase.preferred
            );
            found.push(Problem::new(&file.path, line, message));
        }
    }
}

/// Paths that may contain banned phrases: the list of the phrases itself, this check and its
/// examples, generated pages, and measurements of past days, which stay as they were printed.
const EXEMPT_PATHS: [&str; 6] = [
    GLOSSARY,
    "crates/xtask/src/tidy/vocabulary.rs",
    "docs/design/0015-vocabulary.md",
    "docs/reference/",
    "bench/runs/",
    "fixtures/",
];

/// Whether people write the file and the bans apply to it.
fn is_checked(path: &str) -> bool {
    !EXEMPT_PATHS.iter().any(|exempt| path.starts_with(exempt))
}

/// Reads the rows *preferred term | meaning | do not write* of the glossary.
///
/// The third cell lists phrases in back quotes; the ones after `but not` are allowed.
fn read_glossary(tree: &Tree, found: &mut Vec<Problem>) -> Vec<BannedPhrase> {
    let mut banned = Vec::new();
    for Row { cells, line } in marked_rows(tree, GLOSSARY, "vocabulary", found) {
        let [preferred, _, avoid] = cells[..] else {
            found.push(Problem::new(
                GLOSSARY,
                line,
                "the row needs the preferred term, its meaning, and what not to write",
            ));
            continue;
        };
        let (avoid, allowed) = avoid.split_once("but not").unwrap_or((avoid, ""));
        banned.extend(quoted(avoid).map(|phrase| BannedPhrase {
            phrase,
            allowed_within: quoted(allowed).collect(),
            preferred: preferred.to_string(),
        }));
    }
    banned
}

/// The back-quoted parts of a cell, in lower case.
fn quoted(cell: &str) -> impl Iterator<Item = String> {
    cell.split('`').skip(1).step_by(2).map(str::to_lowercase)
}

/// Every banned phrase of a file with its line number.
fn find_banned<'b>(file: &File, banned: &'b [BannedPhrase]) -> Vec<(usize, &'b BannedPhrase)> {
    let (flat, line_starts) = flatten(&file.text);
    let mut hits = Vec::new();
    for phrase in banned {
        for (offset, _) in flat.match_indices(phrase.phrase.as_str()) {
            let end = offset + phrase.phrase.len();
            let is_word_start = !flat[..offset].ends_with(is_word_char);
            let is_word_end = !flat[end..].starts_with(is_word_char);
            if is_word_start && is_word_end && !is_allowed(&flat, offset, end, phrase) {
                hits.push((line_starts.partition_point(|start| *start <= offset), phrase));
            }
        }
    }
    hits
}

/// Whether a longer phrase of the field covers the bytes `offset..end`.
fn is_allowed(flat: &str, offset: usize, end: usize, phrase: &BannedPhrase) -> bool {
    phrase.allowed_within.iter().any(|allowed| {
        let Some(inside) = allowed.find(phrase.phrase.as_str()) else { return false };
        let Some(start) = offset.checked_sub(inside) else { return false };
        let longer = flat.get(start..start + allowed.len());
        longer == Some(allowed.as_str()) && end <= start + allowed.len()
    })
}

/// Letters and digits, so that `a_circle` holds the word "circle" and `circles` does not.
fn is_word_char(c: char) -> bool {
    c.is_alphanumeric()
}

/// Lower-case text in one line, so that a phrase may run over a line's end, and the offset at which
/// each line of the file begins in it.
fn flatten(text: &str) -> (String, Vec<usize>) {
    let (mut flat, mut line_starts) = (String::with_capacity(text.len()), Vec::new());
    for line in text.lines() {
        line_starts.push(flat.len());
        let line = line.trim_start().trim_start_matches(['/', '!', '>', '#']).trim();
        let mut previous = ' ';
        for c in line.chars() {
            // The names `near_cache` and `NearCache` are read as the phrase "near cache".
            if c.is_uppercase() && previous.is_lowercase() {
                flat.push(' ');
            }
            previous = c;
            match c {
                // Emphasis and code marks do not hide a word.
                '*' | '`' | '\\' => {}
                '_' => flat.push(' '),
                '’' => flat.push('\''),
                c => flat.extend(c.to_lowercase()),
            }
        }
        flat.push_str(if line.is_empty() { ". " } else { " " });
    }
    (flat, line_starts)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "<!-- tidy:vocabulary -->\n| preferred | meaning | do not write |\n|---|---|---|\n\
| GEMM | a matmul kernel | `products`, `product` but not `dot product` |\n\
| wait cycle | ranks that wait for each other | `circle of waits` |\n<!-- /tidy:vocabulary -->\n";

    fn problems(path: &str, text: &str) -> Vec<String> {
        let mut found = Vec::new();
        check(&Tree::from_files(&[(GLOSSARY, PAGE), (path, text)]), &mut found);
        found.iter().map(Problem::to_string).collect()
    }

    #[test]
    fn a_banned_phrase_is_reported_with_the_preferred_term() {
        let found = problems("a.rs", "//! A.\n//! It breaks the circle\n//! of *waits*.\n");
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("a.rs:2: \"circle of waits\""), "{found:?}");
        assert!(found[0].ends_with("write wait cycle"), "{found:?}");
    }

    #[test]
    fn names_are_read_as_words() {
        assert_eq!(problems("a.rs", "fn plan_products() {}\n").len(), 1);
        assert_eq!(problems("a.rs", "struct PlanProducts;\n").len(), 1);
        assert_eq!(problems("a.rs", "fn byproducts() {}\n").len(), 0);
    }

    #[test]
    fn phrases_of_the_field_that_contain_a_banned_word_are_allowed() {
        assert_eq!(problems("a.md", "The dot product of two rows.\n").len(), 0);
        assert_eq!(problems("a.md", "The product of two rows.\n").len(), 1);
    }

    #[test]
    fn measurements_and_the_glossary_are_not_checked() {
        assert_eq!(problems("bench/runs/x/README.md", "products\n").len(), 0);
        assert_eq!(problems(GLOSSARY, PAGE).len(), 0);
    }

    #[test]
    fn a_row_without_three_cells_is_reported() {
        let page = PAGE.replace("| a matmul kernel |", "|");
        let mut found = Vec::new();
        check(&Tree::from_files(&[(GLOSSARY, &page)]), &mut found);
        assert_eq!(found.len(), 1, "{found:?}");
    }
}
