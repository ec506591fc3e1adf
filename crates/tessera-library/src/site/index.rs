//! The first page of the site: the search, and every page by kind.

use std::collections::BTreeSet;

use maud::{Markup, PreEscaped, html};
use serde_json::json;
use tessera_base::Code;

use super::layout::render_document;
use super::markdown::Rendered;
use super::references::{References, code_path};
use super::site_path;
use crate::data::Library;
use crate::page::{Page, all_pages};

const SEARCH: &str = include_str!("search.js");
/// Maximum length of the text of an entry that the search looks into.
const MAX_ENTRY_TEXT: usize = 300;

/// Something that the search finds.
pub(super) struct Entry {
    kind: &'static str,
    title: String,
    link: String,
    /// A text that the result shows, and whose words find it too.
    text: String,
    /// Further words that find it.
    words: String,
}

/// Lists what the search finds: codes, rules, drills, symptoms, claims, pages and their sections.
pub(super) fn list_entries(
    library: &Library,
    codes: &[(&Code, &str)],
    rendered: &[(Page, Rendered)],
    references: &References,
) -> Vec<Entry> {
    let entry = |kind, title: String, link: String, text: String| Entry {
        kind,
        title,
        link,
        text,
        words: String::new(),
    };
    let link = |name: &str| references.link_to(name, "index.html").unwrap_or_default();
    let mut out = Vec::new();
    for (c, _) in codes {
        out.push(entry("code", format!("{} {}", c.id, c.title), code_path(c.id), c.page.to_string()));
    }
    for r in &library.rules {
        out.push(entry("rule", r.id.clone(), link(&r.id), r.text.clone()));
    }
    for d in &library.drills {
        let text = format!("{} {}", d.fault, d.code.as_deref().unwrap_or_default());
        out.push(entry("drill", d.id.clone(), link(&d.id), text));
    }
    for s in &library.symptoms {
        let anchor = crate::link::heading_anchor(&s.title);
        let link = format!("library/symptoms.html#{anchor}");
        let symptom = entry("symptom", s.title.clone(), link, s.what.clone());
        out.push(Entry { words: s.words.join(" "), ..symptom });
    }
    for card in &library.cards {
        let page = site_path(&card.page);
        for c in &card.claims {
            out.push(entry("claim", c.id.clone(), format!("{page}#{}", c.id), c.text.clone()));
        }
    }
    for (page, contents) in rendered {
        let path = site_path(page.path);
        out.push(entry(kind_of(*page), page.title().to_string(), path.clone(), page.opening()));
        for (heading, anchor) in &contents.headings {
            let title = format!("{heading} ({})", page.title());
            out.push(entry("section", title, format!("{path}#{anchor}"), String::new()));
        }
    }
    out
}

/// Returns the kind of a page, in a word.
fn kind_of(page: Page) -> &'static str {
    let folders = [
        ("docs/manual/", "manual"),
        ("docs/library/topics/", "topic"),
        ("docs/library/explainers/", "explainer"),
        ("docs/library/cards/", "card"),
        ("docs/guides/", "guide"),
        ("docs/reference/", "reference"),
        ("docs/design/", "design note"),
    ];
    folders.iter().find(|(folder, _)| page.path.starts_with(folder)).map_or("page", |(_, kind)| kind)
}

/// Renders the script with the entries.
pub(super) fn render_script(entries: &[Entry]) -> String {
    let rows = entries.iter().map(|e| {
        let text: String = e.text.split_whitespace().collect::<Vec<_>>().join(" ");
        let text: String = text.chars().take(MAX_ENTRY_TEXT).collect();
        json!([e.kind, e.title, e.link, text, e.words]).to_string()
    });
    format!("const ENTRIES = [\n{}\n];\n{SEARCH}", rows.collect::<Vec<_>>().join(",\n"))
}

/// Renders the first page.
pub(super) fn render_index(library: &Library, codes: &[(&Code, &str)]) -> String {
    let symptoms = library.symptoms.iter().map(|s| {
        (format!("library/symptoms.html#{}", crate::link::heading_anchor(&s.title)), s.title.clone())
    });
    let numbered = |number: &str, title: &str| format!("{number} {title}");
    let explainers = library.explainers.iter().map(|e| (site_path(&e.page), numbered(&e.number, &e.title)));
    let topics = library.topics.iter().map(|t| (site_path(&t.page), numbered(&t.number, &t.title)));
    let cards = library.cards.iter().map(|c| (site_path(&c.page), c.title.clone()));
    let body = html! {
        h1 { "Why ranks hang, drift or do not start" }
        p.lead { "Type a code, a drill, a rule, or what you see." }
        p { input #q type="search" aria-label="Search" placeholder="T0743, stopped-rank, black frames, nccl hang"; }
        ol #found hidden {}
        div #all {
            (render_list("symptoms", "What do you see?", symptoms))
            (render_list("explainers", "Eight explainers for someone who never ran two GPUs", explainers))
            (render_list("manual", "Manual", list_folder("docs/manual/")))
            (render_list("topics", "Topics", topics))
            (render_list("cards", "What outside sources say", cards))
            (render_list("guides", "Guides", list_folder("docs/guides/")))
            (render_list("reference", "Reference", list_folder("docs/reference/")))
            (render_list("design", "Design notes", list_folder("docs/design/")))
            section #codes {
                h2 { "Codes" }
                @for area in areas(codes) {
                    details {
                        summary { (area) small { (codes.iter().filter(|(_, a)| *a == area).count()) " codes" } }
                        ul { @for (c, _) in codes.iter().filter(|(_, a)| *a == area) {
                            li { a href=(code_path(c.id)) { (c.id) } " " (c.title) }
                        } }
                    }
                }
            }
        }
        script src="search.js" {}
    };
    render_document("Index", "index.html", &body, &BTreeSet::new())
}

/// Returns the areas of the codes, in the order of the codes.
fn areas<'a>(codes: &[(&Code, &'a str)]) -> Vec<&'a str> {
    let mut areas: Vec<&str> = Vec::new();
    for (_, area) in codes {
        if !areas.contains(area) {
            areas.push(area);
        }
    }
    areas
}

/// Lists the pages of a folder, its README first.
fn list_folder(folder: &'static str) -> impl Iterator<Item = (String, String)> {
    let mut found: Vec<Page> = all_pages().filter(|p| p.path.starts_with(folder)).collect();
    found.sort_by_key(|p| !p.path.ends_with("README.md"));
    found.into_iter().map(|p| (site_path(p.path), p.title().to_string()))
}

/// Renders links under a heading; nothing if there are none.
fn render_list(id: &str, heading: &str, links: impl Iterator<Item = (String, String)>) -> Markup {
    let links: Vec<(String, String)> = links.collect();
    if links.is_empty() {
        return PreEscaped(String::new());
    }
    html! {
        section id=(id) {
            h2 { (heading) }
            ul.columns { @for (link, title) in &links { li { a href=(link) { (title) } } } }
        }
    }
}
