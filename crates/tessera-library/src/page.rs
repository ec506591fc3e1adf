//! The embedded pages, and the parts that `tessera explain` shows.

use crate::embedded::PAGES;

/// A page of the repository, as Markdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page {
    /// Path in the repository, such as `docs/manual/kv.md`.
    pub path: &'static str,
    /// The whole page.
    pub text: &'static str,
}

/// Returns all pages, ordered by path.
pub fn all_pages() -> impl Iterator<Item = Page> {
    PAGES.iter().map(|(path, text)| Page { path, text })
}

impl Page {
    /// Returns the page with this name. A page of the manual comes before a page of another folder.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Page> {
        let mut named: Vec<Page> = all_pages().filter(|p| p.name() == name).collect();
        named.sort_by_key(|p| !p.path.starts_with("docs/manual/"));
        named.first().copied()
    }

    /// Returns the page with this path.
    #[must_use]
    pub fn from_path(path: &str) -> Option<Page> {
        all_pages().find(|p| p.path == path)
    }

    /// Returns the name of the file, without its extension and without the number of a topic.
    #[must_use]
    pub fn name(self) -> &'static str {
        let file = self.path.rsplit('/').next().unwrap_or(self.path);
        let stem = file.strip_suffix(".md").unwrap_or(file);
        match stem.split_once('-') {
            Some((number, name)) if number.bytes().all(|b| b.is_ascii_digit()) => name,
            _ => stem,
        }
    }

    /// Returns the heading of the page.
    #[must_use]
    pub fn title(self) -> &'static str {
        self.text.lines().next().and_then(|l| l.strip_prefix("# ")).unwrap_or(self.name())
    }

    /// Returns the sentences before the first section.
    #[must_use]
    pub fn opening(self) -> String {
        let head = self.text.split("\n## ").next().unwrap_or_default();
        let prose: Vec<&str> = head.lines().filter(|l| !l.starts_with(['#', '<', '|'])).collect();
        strip_markup(&prose.join(" "))
    }

    /// Returns the first paragraph of a section, without the syntax of Markdown; empty if there is no
    /// such section.
    #[must_use]
    pub fn first_paragraph(self, section: &str) -> String {
        let body = self.section(section);
        let paragraph = body.trim_start().split("\n\n").next().unwrap_or_default();
        strip_markup(&paragraph.replace('\n', " "))
    }

    /// Returns the list items of a section, without the syntax of Markdown; none if there is no such
    /// section.
    #[must_use]
    pub fn list_items(self, section: &str) -> Vec<String> {
        let mut items: Vec<String> = Vec::new();
        let mut is_open = false;
        for line in self.section(section).lines() {
            if let Some(item) = line.strip_prefix("- ") {
                items.push(item.to_string());
                is_open = true;
            } else if let (true, Some(more), Some(item)) =
                (is_open, line.strip_prefix("  "), items.last_mut())
            {
                *item = format!("{item} {more}");
            } else {
                is_open = false;
            }
        }
        items.iter().map(|i| strip_markup(i)).collect()
    }

    /// Returns the text below a heading of the second level, up to the next one.
    fn section(self, name: &str) -> &'static str {
        let heading = format!("\n## {name}\n");
        self.text.split_once(&heading).map_or("", |(_, rest)| rest.split("\n## ").next().unwrap_or(rest))
    }
}

/// Replaces each link `[text](target)` by its text and drops the stars of emphasis; back quotes stay,
/// because they mark what to type.
#[must_use]
pub fn strip_markup(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, link)) = rest.split_once('[') {
        out += before;
        match link.split_once("](").and_then(|(name, end)| Some((name, end.split_once(')')?.1))) {
            Some((name, after)) => {
                out += name;
                rest = after;
            }
            None => {
                out.push('[');
                rest = link;
            }
        }
    }
    (out + rest).replace('*', "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_become_their_text() {
        assert_eq!(strip_markup("see [a](b.md), *done* and `f(x)[0]`"), "see a, done and `f(x)[0]`");
    }

    #[test]
    fn a_page_is_found_by_its_name() {
        assert_eq!(Page::from_name("kv").map(|p| p.path), Some("docs/manual/kv.md"));
        assert_eq!(Page::from_name("vocabulary").map(|p| p.path), Some("docs/design/0015-vocabulary.md"));
        assert!(Page::from_name("kv").is_some_and(|p| p.opening().split_whitespace().count() > 20));
    }
}
