//! The frame of a page: the way back to the index, the search field, and the pages that link to it.

use std::collections::BTreeSet;

use maud::{Markup, PreEscaped, html};
use tessera_base::Code;
use tessera_report::html::render_html_page;

use super::markdown::Rendered;
use super::references::References;
use crate::data::Library;
use crate::link::{heading_anchor, relative_link};
use crate::page::Page;

const SITE_STYLE: &str = include_str!("site.css");

/// A page that links to another one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BackLink {
    pub(super) title: String,
    pub(super) path: String,
}

/// Renders a page of the repository.
pub(super) fn render_page(
    page: Page,
    path: &str,
    contents: &Rendered,
    back_links: &BTreeSet<BackLink>,
    library: &Library,
) -> String {
    let sections = contents.headings.len();
    let body = html! {
        h1 id=(heading_anchor(page.title())) { (page.title()) }
        @if let Some(position) = describe_place(page, library) { p.note { (position) } }
        @if sections > 6 {
            details.contents {
                summary { "On this page" small { (sections) " sections" } }
                ul { @for (text, anchor) in &contents.headings { li { a href={ "#" (anchor) } { (text) } } } }
            }
        }
        article { (PreEscaped(&contents.html)) }
    };
    render_document(page.title(), path, &body, back_links)
}

/// Says what kind of page this is, with its number or version.
fn describe_place(page: Page, library: &Library) -> Option<String> {
    if let Some(t) = library.topics.iter().find(|t| t.page == page.path) {
        let kind = if page.path.starts_with("docs/manual/") { "Operator topic" } else { "Topic" };
        return Some(format!("{kind} {} · {}", t.number, t.name));
    }
    if let Some(e) = library.explainers.iter().find(|e| e.page == page.path) {
        return Some(format!("Explainer {} · {}", e.number, e.name));
    }
    let card = library.cards.iter().find(|c| c.page == page.path)?;
    Some(format!("Card · {}", card.name))
}

/// Renders the page of a diagnostic code.
pub(super) fn render_code_page(
    code: &Code,
    area: &str,
    path: &str,
    library: &Library,
    references: &References,
    back_links: &BTreeSet<BackLink>,
) -> String {
    let link = |name: &str| references.link_to(name, path).unwrap_or_default();
    let rules: Vec<_> = library.rules_of_code(code.id).collect();
    let drills: Vec<_> = library.drills_of_code(code.id).collect();
    let ids: Vec<&str> = rules.iter().map(|r| r.id.as_str()).collect();
    let body = html! {
        h1 { (code.id) }
        p.lead { (code.title) }
        p.note { "Raised by: " (area) }
        article {
            @for paragraph in code.page.split("\n\n") { p { (link_names(paragraph, references, path)) } }
            @if !rules.is_empty() {
                h2 { "Rules" }
                ul { @for r in &rules { li { a href=(link(&r.id)) { (r.id) } " " @if r.forbidden { "Forbidden: " } (link_names(&r.text, references, path)) } } }
            }
            @if !drills.is_empty() {
                h2 { "Drills" }
                ul { @for d in &drills { li { a href=(link(&d.id)) { code { (d.id) } } " " (d.fault) } } }
            }
            @let explainers = library.explainers_of_rules(&ids);
            @let topics = library.topics_of_rules(&ids);
            @if !explainers.is_empty() || !topics.is_empty() {
                h2 { "Read on" }
                ul {
                    @for e in explainers { li { (link_page(&e.page, &e.title, path)) } }
                    @for t in topics { li { (link_page(&t.page, &t.title, path)) } }
                }
            }
        }
    };
    render_document(code.id, path, &body, back_links)
}

fn link_page(page: &str, title: &str, from: &str) -> Markup {
    html! { a href=(relative_link(from, &super::site_path(page))) { (title) } }
}

/// Renders plain text: what stands in back quotes is code, and rules, codes and drills are links.
fn link_names(text: &str, references: &References, from: &str) -> Markup {
    html! {
        @for (i, part) in text.split('`').enumerate() {
            @if i % 2 == 1 {
                (link_name(part, html! { code { (part) } }, references, from))
            } @else {
                @for (plain, name) in references.split_names(part) {
                    (plain)
                    @if let Some(name) = name { (link_name(name, html! { (name) }, references, from)) }
                }
            }
        }
    }
}

/// Renders a name as a link to its place, if it has one.
fn link_name(name: &str, shown: Markup, references: &References, from: &str) -> Markup {
    match references.link_to(name, from) {
        Some(link) => html! { a href=(link) { (shown) } },
        None => shown,
    }
}

/// Renders a whole document.
pub(super) fn render_document(
    title: &str,
    path: &str,
    body: &Markup,
    back_links: &BTreeSet<BackLink>,
) -> String {
    let index = relative_link(path, "index.html");
    let main = html! {
        nav {
            a href=(index) { "Tessera library" }
            @if path != "index.html" {
                form action=(index) role="search" {
                    input type="search" name="q" aria-label="Search" placeholder="code, drill, rule, symptom";
                }
            }
        }
        (body)
        @if !back_links.is_empty() {
            section.back {
                h2 { "Linked from" }
                ul { @for b in back_links { li { a href=(relative_link(path, &b.path)) { (b.title) } } } }
            }
        }
        footer { "Written by " code { "tessera explain --html" } " of version " (env!("CARGO_PKG_VERSION")) }
    };
    render_html_page(&format!("{title} · Tessera library"), SITE_STYLE, &main)
}
