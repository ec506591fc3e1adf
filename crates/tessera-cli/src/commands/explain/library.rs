//! The rules, drills, symptoms and pages that the binary contains, so that it answers without the
//! repository.

use serde::Deserialize;

/// The data that `cargo xtask library` writes from the pages.
const DATA: &str = include_str!("../../../../../docs/library/library.json");

/// Every page with rules, by its name.
pub(super) const PAGES: [Page; 10] = [
    Page { name: "control-plane", text: include_str!("../../../../../docs/manual/control-plane.md") },
    Page { name: "determinism", text: include_str!("../../../../../docs/manual/determinism.md") },
    Page { name: "groups", text: include_str!("../../../../../docs/manual/groups.md") },
    Page { name: "kv", text: include_str!("../../../../../docs/manual/kv.md") },
    Page { name: "overlap", text: include_str!("../../../../../docs/manual/overlap.md") },
    Page { name: "replay", text: include_str!("../../../../../docs/manual/replay.md") },
    Page { name: "scheduling", text: include_str!("../../../../../docs/manual/scheduling.md") },
    Page { name: "shutdown", text: include_str!("../../../../../docs/manual/shutdown.md") },
    Page { name: "compile", text: include_str!("../../../../../docs/manual/compile.md") },
    Page { name: "captured-regions", text: include_str!("../../../../../docs/guides/captured-regions.md") },
];

/// The contents of the data file.
#[derive(Debug, Deserialize)]
pub(super) struct Library {
    pub(super) rules: Vec<Rule>,
    pub(super) drills: Vec<Drill>,
    codes: Vec<CodePage>,
    pub(super) symptoms: Vec<Symptom>,
}

/// A rule of a page.
#[derive(Debug, Deserialize)]
pub(super) struct Rule {
    pub(super) id: String,
    pub(super) page: String,
    pub(super) forbidden: bool,
    pub(super) text: String,
    pub(super) codes: Vec<String>,
    pub(super) drills: Vec<String>,
}

/// A drill with its expected failure.
#[derive(Debug, Deserialize)]
pub(super) struct Drill {
    pub(super) id: String,
    /// `None` for a measurement.
    pub(super) code: Option<String>,
    pub(super) rank: String,
    pub(super) place: String,
    pub(super) fault: String,
    pub(super) page: String,
    pub(super) rules: Vec<String>,
}

/// The page on which a code stands.
#[derive(Debug, Deserialize)]
struct CodePage {
    id: String,
    page: Option<String>,
}

/// A problem as a person sees it.
#[derive(Debug, Deserialize)]
pub(super) struct Symptom {
    pub(super) title: String,
    pub(super) words: Vec<String>,
    pub(super) what: String,
    pub(super) first: String,
    pub(super) codes: Vec<String>,
    pub(super) drills: Vec<String>,
    pub(super) pages: Vec<String>,
}

/// A page of the manual, or the guide to captured regions, as Markdown.
#[derive(Debug, Clone, Copy)]
pub(super) struct Page {
    pub(super) name: &'static str,
    pub(super) text: &'static str,
}

impl Library {
    /// Reads the data of this build.
    ///
    /// # Panics
    /// Panics if the embedded file is not what `cargo xtask library` writes, which every test that
    /// calls this function finds.
    pub(super) fn read() -> Library {
        let mut library: Library = serde_json::from_str(DATA).expect("the embedded library is valid");
        let rules = library.rules.iter_mut().map(|r| &mut r.text);
        let symptoms = library.symptoms.iter_mut().flat_map(|s| [&mut s.what, &mut s.first]);
        rules.chain(symptoms).for_each(|text| *text = strip_markup(text));
        library
    }

    /// The drills that end with a code.
    pub(super) fn drills_of_code<'a>(&'a self, code: &'a str) -> impl Iterator<Item = &'a Drill> {
        self.drills.iter().filter(move |d| d.code.as_deref() == Some(code))
    }

    /// The rules that name a code or a drill that ends with it, in the order of their ids.
    pub(super) fn rules_of_code<'a>(&'a self, code: &'a str) -> impl Iterator<Item = &'a Rule> {
        let ends_with = |drill: &String| self.drills_of_code(code).any(|d| d.id == *drill);
        self.rules.iter().filter(move |r| r.codes.iter().any(|c| c == code) || r.drills.iter().any(ends_with))
    }

    /// The page on which a code stands.
    pub(super) fn page_of_code(&self, code: &str) -> Option<&str> {
        self.codes.iter().find(|c| c.id == code)?.page.as_deref()
    }

    /// The fault of a drill, in a few words.
    pub(super) fn fault_of(&self, drill: &str) -> &str {
        self.drills.iter().find(|d| d.id == drill).map_or("", |d| &d.fault)
    }
}

impl Page {
    /// The heading of the page.
    pub(super) fn title(self) -> &'static str {
        self.text.lines().next().and_then(|l| l.strip_prefix("# ")).unwrap_or(self.name)
    }

    /// The sentences before the first section.
    pub(super) fn opening(self) -> String {
        let head = self.text.split("\n## ").next().unwrap_or_default();
        let prose: Vec<&str> = head.lines().filter(|l| !l.starts_with(['#', '<'])).collect();
        strip_markup(&prose.join(" "))
    }

    /// The list items of a section, without the syntax of Markdown; none if there is no such
    /// section.
    pub(super) fn list_items(self, section: &str) -> Vec<String> {
        let mut items: Vec<String> = Vec::new();
        let heading = format!("\n## {section}\n");
        let body =
            self.text.split_once(&heading).map_or("", |(_, rest)| rest.split("\n## ").next().unwrap_or(rest));
        let mut is_open = false;
        for line in body.lines() {
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
}

/// Replaces each link `[text](target)` by its text and drops the stars of emphasis; back quotes stay,
/// because they mark what to type.
pub(super) fn strip_markup(text: &str) -> String {
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
    fn every_page_that_the_data_name_is_embedded() {
        let library = Library::read();
        let is_embedded = |name: &String| PAGES.iter().any(|p| p.name == name);
        assert!(library.rules.iter().map(|r| &r.page).all(is_embedded));
        assert!(library.drills.iter().map(|d| &d.page).all(is_embedded));
        assert!(library.symptoms.iter().flat_map(|s| &s.pages).all(is_embedded));
        assert!(library.codes.iter().filter_map(|c| c.page.as_ref()).all(is_embedded));
        for page in PAGES {
            assert!(library.rules.iter().any(|r| r.page == page.name), "{}", page.name);
            assert!(page.opening().split_whitespace().count() > 20, "{}", page.name);
        }
    }
}
