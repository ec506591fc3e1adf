//! Prompt packs: several pages as one text, for a reviewer who has nothing else.
//!
//! Every link of a pack leads to a place in the pack. A link to a page outside of it becomes plain
//! text, because the reader could not follow it.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::embedded::PACKS;
use crate::link::{Target, heading_anchor, resolve_link};
use crate::page::Page;

/// The pages of a pack, as its file lists them.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pack {
    /// Name of the file without its extension, such as `review`.
    #[serde(skip)]
    pub name: String,
    /// Heading of the text.
    pub title: String,
    /// Maximum length of the whole text, in KiB.
    pub limit_kib: usize,
    intent: String,
    group: Vec<Group>,
    ask: Vec<Ask>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    title: String,
    /// Paths in the repository, in reading order.
    pages: Vec<String>,
    /// Maximum length of the group's pages together, in KiB.
    limit_kib: Option<usize>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ask {
    text: String,
    /// Path and anchor of the section with the project's own answer.
    answer: String,
}

/// Returns all packs of this build, ordered by name.
///
/// # Errors
/// Returns a text that names the file and the place if a pack is not valid, which a test of this crate
/// excludes for the embedded ones.
pub fn read_packs() -> Result<Vec<Pack>, String> {
    PACKS
        .iter()
        .map(|(path, text)| {
            let mut pack: Pack = toml::from_str(text).map_err(|e| format!("{path}: {e}"))?;
            let file = path.rsplit('/').next().unwrap_or(path);
            pack.name = file.trim_end_matches(".toml").to_string();
            Ok(pack)
        })
        .collect()
}

impl Pack {
    /// Returns the whole text.
    ///
    /// # Errors
    /// Returns a text that names the page if one does not exist, an answer leads nowhere, or the text is
    /// longer than its limit.
    pub fn render(&self) -> Result<String, String> {
        let sections = self.number_pages()?;
        let contents = Contents::new(&sections);
        let mut out = format!("# {}\n\n{}\n\n## Questions\n\n", self.title, self.intent.trim());
        for (ask, number) in self.ask.iter().zip(1..) {
            let anchor = resolve_link("", &ask.answer).and_then(|t| contents.anchor_of(&t));
            let anchor =
                anchor.ok_or(format!("{}: no page of the pack answers at {}", self.name, ask.answer))?;
            out += &format!("{number}. {} The project's own answer: [here](#{anchor}).\n", ask.text);
        }
        let mut sections = sections.iter();
        for (group, letter) in self.group.iter().zip('A'..) {
            out += &format!("\n## Part {letter}. {}\n", group.title);
            let start = out.len();
            for section in sections.by_ref().take(group.pages.len()) {
                out += &contents.render_page(section);
            }
            check_limit(&format!("{}, part {letter}", self.name), out.len() - start, group.limit_kib)?;
        }
        check_limit(&self.name, out.len(), Some(self.limit_kib))?;
        Ok(out)
    }

    /// Returns the pages with their numbers, such as `A.3`, in reading order.
    fn number_pages(&self) -> Result<Vec<Section>, String> {
        let mut sections = Vec::new();
        for (group, letter) in self.group.iter().zip('A'..) {
            for (path, number) in group.pages.iter().zip(1..) {
                let page = Page::from_path(path).ok_or(format!("{}: there is no page {path}", self.name))?;
                sections.push(Section { page, number: format!("{letter}.{number}") });
            }
        }
        Ok(sections)
    }
}

fn check_limit(name: &str, bytes: usize, limit_kib: Option<usize>) -> Result<(), String> {
    match limit_kib {
        Some(limit) if bytes > limit * 1024 => Err(format!(
            "pack {name} has {} KiB, and its limit is {limit} KiB: leave a page out",
            bytes.div_ceil(1024)
        )),
        _ => Ok(()),
    }
}

/// A page with its number in the pack.
struct Section {
    page: Page,
    number: String,
}

/// Where the pages of a pack and their headings stand in its text.
struct Contents<'a> {
    /// The prefix of a page's anchors, by its path.
    prefixes: BTreeMap<&'a str, String>,
    /// Path and heading anchor of every heading.
    headings: Vec<(&'a str, String)>,
}

impl<'a> Contents<'a> {
    fn new(sections: &'a [Section]) -> Contents<'a> {
        let prefix = |s: &Section| format!("p-{}", s.number.replace('.', "").to_lowercase());
        let prefixes = sections.iter().map(|s| (s.page.path, prefix(s))).collect();
        let of_page = |s: &'a Section| {
            list_headings(s.page.text).map(|(_, heading)| (s.page.path, heading_anchor(heading)))
        };
        Contents { prefixes, headings: sections.iter().flat_map(of_page).collect() }
    }

    /// Returns the anchor in the pack for a place in a page, or `None` if it is not part of the pack. A
    /// place that is no heading leads to the head of its page.
    fn anchor_of(&self, target: &Target) -> Option<String> {
        let prefix = self.prefixes.get(target.path.as_str())?;
        let is_heading = self.headings.iter().any(|(path, h)| *path == target.path && *h == target.anchor);
        Some(if is_heading { format!("{prefix}-{}", target.anchor) } else { prefix.clone() })
    }

    fn render_page(&self, section: &Section) -> String {
        let Section { page, number } = section;
        let prefix = &self.prefixes[page.path];
        let mut out = format!("\n<a id=\"{prefix}\"></a>\n\n### {number} {}\n", page.title());
        // A link may continue on the next line, so the lines between two headings are one text.
        let mut prose = String::new();
        let mut is_code = false;
        for line in page.text.lines().skip(1) {
            let is_fence = line.trim_start().starts_with("```");
            let heading = heading_of(line).filter(|_| !is_code);
            if is_fence || is_code || heading.is_some() {
                out += &self.rewrite_links(page.path, &std::mem::take(&mut prose));
            }
            is_code ^= is_fence;
            match heading {
                Some((level, heading)) => {
                    let anchor = heading_anchor(heading);
                    let marks = "#".repeat((level + 2).min(6));
                    out += &format!("<a id=\"{prefix}-{anchor}\"></a>\n\n{marks} {heading}\n");
                }
                None if is_code || is_fence => out += &format!("{line}\n"),
                None if line.starts_with("<!--") => {}
                None => prose += &format!("{line}\n"),
            }
        }
        out + &self.rewrite_links(page.path, &prose)
    }

    /// Points the links of a text into the pack. Other links become their text, an address in parentheses
    /// behind it; a picture becomes its description.
    fn rewrite_links(&self, page: &str, text: &str) -> String {
        let (mut out, mut rest) = (String::new(), text);
        while let Some((before, link)) = rest.split_once('[') {
            let parts = link.split_once("](").and_then(|(text, end)| Some((text, end.split_once(')')?)));
            let Some((text, (address, after))) = parts.filter(|(text, _)| !text.contains('[')) else {
                out += before;
                out.push('[');
                rest = link;
                continue;
            };
            let is_picture = before.ends_with('!');
            out += before.strip_suffix('!').unwrap_or(before);
            out += &match resolve_link(page, address) {
                _ if is_picture => format!("(picture: {text})"),
                None => format!("{text} ({address})"),
                Some(target) => match self.anchor_of(&target) {
                    Some(anchor) => format!("[{text}](#{anchor})"),
                    None => text.to_string(),
                },
            };
            rest = after;
        }
        out + rest
    }
}

/// Iterates over the headings of a page below its title, with their level.
fn list_headings(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    text.lines().skip(1).filter_map(move |line| {
        is_code ^= line.trim_start().starts_with("```");
        heading_of(line).filter(|_| !is_code)
    })
}

fn heading_of(line: &str) -> Option<(usize, &str)> {
    let level = line.bytes().take_while(|b| *b == b'#').count();
    let heading = line[level..].strip_prefix(' ')?;
    (1..=6).contains(&level).then_some((level, heading.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find_pack(name: &str) -> Pack {
        read_packs().unwrap().into_iter().find(|p| p.name == name).unwrap()
    }

    #[test]
    fn every_link_of_a_pack_leads_to_a_place_in_it() {
        for name in ["review", "compile"] {
            let text = find_pack(name).render().unwrap();
            let targets: Vec<&str> =
                text.split("](#").skip(1).filter_map(|rest| rest.split(')').next()).collect();
            assert!(targets.len() > 40, "{name}: {}", targets.len());
            for target in targets {
                assert!(text.contains(&format!("<a id=\"{target}\"></a>")), "{name}: #{target}");
            }
            let other_links = text.match_indices("](").filter(|(at, _)| !text[at + 2..].starts_with('#'));
            assert_eq!(other_links.map(|(at, _)| &text[at..at + 40]).next(), None, "{name}");
        }
    }

    #[test]
    fn the_pages_stand_in_the_order_of_the_file() {
        let pack = find_pack("review");
        let text = pack.render().unwrap();
        let numbers: Vec<String> = pack.number_pages().unwrap().into_iter().map(|s| s.number).collect();
        let places: Vec<usize> = numbers.iter().map(|n| text.find(&format!("\n### {n} ")).unwrap()).collect();
        assert!(places.is_sorted());
        assert_eq!(pack.group.iter().map(|g| g.pages.len()).collect::<Vec<_>>(), [8, 6, 4]);
        assert_eq!(pack.ask.len(), 4);
    }

    #[test]
    fn a_pack_above_its_limit_is_refused() {
        let mut pack = find_pack("compile");
        pack.limit_kib = 10;
        assert!(pack.render().unwrap_err().contains("its limit is 10 KiB"));
        pack.group[0].pages.push("docs/absent.md".to_string());
        assert!(pack.render().unwrap_err().contains("no page docs/absent.md"));
    }
}
