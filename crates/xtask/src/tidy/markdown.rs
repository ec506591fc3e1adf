//! Reads the parts of a Markdown page: sections, paragraphs, links and the anchors of headings.

use std::collections::{BTreeMap, BTreeSet};

use super::page::{Row, table_rows};

/// The part of a page below a heading.
#[derive(Debug, Clone)]
pub(super) struct Section<'a> {
    pub(super) name: &'a str,
    /// Line number of the heading.
    pub(super) line: usize,
    pub(super) lines: Vec<&'a str>,
}

impl<'a> Section<'a> {
    /// Returns the rows of all tables of the section, without their headers.
    pub(super) fn rows(&self) -> Vec<Row<'a>> {
        table_rows((self.line + 1..).zip(self.lines.iter().copied()))
    }

    /// Returns the text below the heading.
    pub(super) fn text(&self) -> String {
        self.lines.join("\n")
    }
}

/// A link of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Link<'a> {
    pub(super) line: usize,
    pub(super) text: &'a str,
    /// The target without its anchor; empty if the link leads to its own page.
    pub(super) path: &'a str,
    /// The part after `#`, which names a heading.
    pub(super) anchor: Option<&'a str>,
}

/// Splits a page at its headings of one level, outside of code fences. A heading of a higher level ends
/// a section.
pub(super) fn split_sections(text: &str, level: usize) -> Vec<Section<'_>> {
    let mut out: Vec<Section<'_>> = Vec::new();
    let (mut fenced, mut is_open) = (false, false);
    for (line, number) in text.lines().zip(1..) {
        fenced ^= is_fence(line);
        match read_heading(line).filter(|_| !fenced) {
            Some((depth, name)) if depth == level => {
                out.push(Section { name, line: number, lines: Vec::new() });
                is_open = true;
            }
            Some((depth, _)) if depth < level => is_open = false,
            _ => {
                if let (true, Some(section)) = (is_open, out.last_mut()) {
                    section.lines.push(line);
                }
            }
        }
    }
    out
}

/// Returns the paragraphs, list items, headings and table rows of a page, each as one line, with the
/// number of its first line. Code fences are left out.
pub(super) fn split_paragraphs(text: &str) -> Vec<(usize, String)> {
    let mut out: Vec<(usize, String)> = Vec::new();
    let (mut fenced, mut begins) = (false, true);
    for (line, number) in text.lines().zip(1..) {
        fenced ^= is_fence(line);
        if fenced || is_fence(line) || line.trim().is_empty() {
            begins = true;
            continue;
        }
        begins |= line.starts_with(['|', '#', '-']);
        match out.last_mut() {
            Some((_, text)) if !begins => *text = format!("{text} {}", line.trim()),
            _ => out.push((number, line.trim().to_string())),
        }
        begins = line.starts_with('#');
    }
    out
}

/// Finds the links of a page outside of code.
pub(super) fn find_links(text: &str) -> Vec<Link<'_>> {
    let prose = mask_code(text);
    let links = prose.match_indices("](").filter_map(|(at, mark)| {
        let rest = &text[at + mark.len()..];
        let target = rest.split(')').next()?.split_whitespace().next().unwrap_or_default();
        let (path, anchor) = match target.split_once('#') {
            Some((path, anchor)) => (path, Some(anchor)),
            None => (target, None),
        };
        let begin = prose[..at].rfind('[').map_or(at, |open| open + 1);
        Some(Link { line: text[..at].matches('\n').count() + 1, text: &text[begin..at], path, anchor })
    });
    links.collect()
}

/// Resolves a link of a page to a path from the root; `None` if it leaves the project.
pub(super) fn resolve_link(page: &str, link: &str) -> Option<String> {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

/// Returns the anchors of a page, as GitHub makes them from headings, and those of `<a id="…">`. A
/// heading that occurs again has a number at the end.
pub(super) fn find_anchors(text: &str) -> BTreeSet<String> {
    let (mut fenced, mut counts) = (false, BTreeMap::<String, usize>::new());
    let mut out = BTreeSet::new();
    for line in text.lines() {
        fenced ^= is_fence(line);
        if fenced {
            continue;
        }
        if let Some((_, name)) = read_heading(line) {
            let slug = make_anchor(name);
            let count = counts.entry(slug.clone()).or_default();
            out.insert(if *count == 0 { slug } else { format!("{slug}-{count}") });
            *count += 1;
        }
        let ids = line.split("<a id=\"").skip(1).filter_map(|rest| rest.split('"').next());
        out.extend(ids.map(str::to_string));
    }
    out
}

/// Returns the value of the comment `<!-- key: value -->` above the first section, and its line.
pub(super) fn read_comment<'a>(text: &'a str, key: &str) -> Option<(usize, &'a str)> {
    let head = (1..).zip(text.lines()).take_while(|(_, line)| !line.starts_with("## "));
    let mut values = head.filter_map(|(number, line)| {
        let value =
            line.strip_prefix("<!-- ")?.strip_suffix(" -->")?.strip_prefix(key)?.strip_prefix(": ")?;
        Some((number, value.trim()))
    });
    values.next()
}

/// Returns the title of a page; empty if it has none.
pub(super) fn read_title(text: &str) -> &str {
    text.lines().next().and_then(|line| line.strip_prefix("# ")).unwrap_or_default().trim()
}

/// Returns the depth and the text of a heading.
fn read_heading(line: &str) -> Option<(usize, &str)> {
    let name = line.trim_start_matches('#');
    let depth = line.len() - name.len();
    ((1..=6).contains(&depth) && name.starts_with(' ')).then(|| (depth, name.trim()))
}

/// Returns the anchor of a heading: lower case, with hyphens for spaces and without punctuation.
pub(super) fn make_anchor(heading: &str) -> String {
    let mut shown = String::new();
    let mut rest = heading;
    // The target of a link does not belong to the text of its heading.
    while let Some((before, after)) = rest.split_once("](") {
        shown += before;
        rest = after.split_once(')').map_or("", |(_, after)| after);
    }
    shown += rest;
    let kept = shown.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect::<String>().to_lowercase()
}

fn is_fence(line: &str) -> bool {
    line.trim_start().starts_with("```")
}

/// Replaces code fences and code between back quotes by spaces, so that every other byte keeps its
/// offset.
fn mask_code(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let (mut fenced, mut in_code) = (false, false);
    let blank = |c: char| if c == '\n' { "\n".to_string() } else { " ".repeat(c.len_utf8()) };
    for line in text.split_inclusive('\n') {
        let fence = is_fence(line);
        fenced ^= fence;
        // A span of code ends with its paragraph at the latest.
        if fence || line.trim().is_empty() || line.starts_with(['|', '#']) {
            in_code = false;
        }
        for c in line.chars() {
            in_code ^= c == '`' && !fence && !fenced;
            if fence || fenced || in_code { out += &blank(c) } else { out.push(c) }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_end_at_a_heading_of_their_level_or_above() {
        let text = "# T\n## A\na\n### B\nb\n```\n## no\n```\n## C\nc\n";
        let names = |level| split_sections(text, level).iter().map(|s| (s.name, s.line)).collect::<Vec<_>>();
        assert_eq!(names(2), [("A", 2), ("C", 9)]);
        assert_eq!(names(3), [("B", 4)]);
        assert_eq!(split_sections(text, 3)[0].lines, ["b", "```", "## no", "```"]);
        assert_eq!(split_sections(text, 2)[0].text(), "a\n### B\nb\n```\n## no\n```");
    }

    #[test]
    fn links_have_text_path_and_anchor() {
        let text =
            "See [the\nmanual](a.md#b-1), `[x](no.md)` and [`y`](#z).\n```\n[n](m)\n```\n[w](https://w/#v)\n";
        let links: Vec<_> =
            find_links(text).into_iter().map(|l| (l.line, l.text, l.path, l.anchor)).collect();
        assert_eq!(
            links,
            [
                (2, "the\nmanual", "a.md", Some("b-1")),
                (2, "`y`", "", Some("z")),
                (6, "w", "https://w/", Some("v")),
            ]
        );
    }

    #[test]
    fn headings_have_the_anchors_of_github() {
        let text = "# Stashed, recomputed or sent\n## What `tessera check` proves\n### nccl-3\n## Details\n\
## Details\n```\n# no\n```\n## [Linked](a.md#b) text\n<a id=\"own\"></a>\n#Hash\n";
        let expected = [
            "details",
            "details-1",
            "linked-text",
            "nccl-3",
            "own",
            "stashed-recomputed-or-sent",
            "what-tessera-check-proves",
        ];
        assert_eq!(find_anchors(text).iter().map(String::as_str).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn comments_stand_above_the_first_section() {
        let text = "# Title\n\n<!-- topic: 05 a-b -->\n\n## S\n<!-- status: ready -->\n";
        assert_eq!(read_comment(text, "topic"), Some((3, "05 a-b")));
        assert_eq!((read_comment(text, "status"), read_title(text)), (None, "Title"));
    }
}
