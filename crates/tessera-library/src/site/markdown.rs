//! Markdown to HTML: headings get anchors, links lead to pages of the site, and rules, codes and drills
//! become links.

use std::collections::BTreeSet;

use maud::{Markup, html};
use pulldown_cmark::{CowStr, Event, Options, Parser, Tag, TagEnd, html::push_html};

use super::references::{DRILLS, References};
use super::site_path;
use crate::link::{Target, heading_anchor, relative_link, resolve_link};
use crate::page::Page;

/// Where the sources are that the site does not contain.
const REPOSITORY: &str = env!("CARGO_PKG_REPOSITORY");

/// A page as HTML.
pub(super) struct Rendered {
    /// The body, without the title.
    pub(super) html: String,
    /// Paths of the pages of the site to which it links.
    pub(super) targets: BTreeSet<String>,
    /// Headings of the second and third level with their anchors.
    pub(super) headings: Vec<(String, String)>,
}

/// Renders a page.
pub(super) fn render_markdown(page: Page, references: &References) -> Rendered {
    let body = page.text.split_once('\n').map_or("", |(_, body)| body);
    let events: Vec<Event<'_>> = Parser::new_ext(body, Options::ENABLE_TABLES).collect();
    let mut renderer = Renderer {
        page,
        path: site_path(page.path),
        references,
        rendered: Rendered { html: String::new(), targets: BTreeSet::new(), headings: Vec::new() },
        plain_depth: 0,
    };
    let mut out = Vec::new();
    let mut at = 0;
    while at < events.len() {
        at += renderer.render_event(&events[at..], &mut out);
    }
    push_html(&mut renderer.rendered.html, out.into_iter());
    renderer.rendered
}

struct Renderer<'a> {
    page: Page,
    /// Path of the page in the site.
    path: String,
    references: &'a References,
    rendered: Rendered,
    /// Number of open links, headings and code blocks, in which nothing becomes a link.
    plain_depth: usize,
}

impl Renderer<'_> {
    /// Renders the first of some events, with those that belong to it, and returns their number.
    fn render_event<'e>(&mut self, events: &[Event<'e>], out: &mut Vec<Event<'e>>) -> usize {
        match &events[0] {
            Event::Start(Tag::Strong) => {
                if let [_, Event::Text(id), Event::End(TagEnd::Strong), ..] = events
                    && self.defines_rule(id)
                {
                    out.push(to_html(html! { strong id=(id) { (id) } }));
                    return 3;
                }
            }
            Event::Start(Tag::Heading { level, .. }) => {
                self.plain_depth += 1;
                let text = heading_text(events);
                let anchor = self.make_anchor(&text);
                out.push(Event::InlineHtml(format!("<{level} id=\"{anchor}\">").into()));
                self.rendered.headings.push((text, anchor));
                return 1;
            }
            Event::End(TagEnd::Heading(level)) => {
                self.plain_depth -= 1;
                out.push(Event::InlineHtml(format!("</{level}>\n").into()));
                return 1;
            }
            Event::Start(Tag::Table(_)) => {
                out.push(Event::InlineHtml("<div class=\"scroll\">".into()));
                out.push(events[0].clone());
                return 1;
            }
            Event::End(TagEnd::Table) => {
                out.push(events[0].clone());
                out.push(Event::InlineHtml("</div>\n".into()));
                return 1;
            }
            Event::Start(Tag::Link { link_type, dest_url, title, id }) => {
                self.plain_depth += 1;
                let dest_url = self.rewrite_link(dest_url).into();
                let (link_type, title, id) = (*link_type, title.clone(), id.clone());
                out.push(Event::Start(Tag::Link { link_type, dest_url, title, id }));
                return 1;
            }
            Event::Start(Tag::Image { link_type, dest_url, title, id }) => {
                let dest_url = self.rewrite_link(dest_url).into();
                let (link_type, title, id) = (*link_type, title.clone(), id.clone());
                out.push(Event::Start(Tag::Image { link_type, dest_url, title, id }));
                return 1;
            }
            Event::Start(Tag::CodeBlock(_)) => self.plain_depth += 1,
            Event::End(TagEnd::CodeBlock | TagEnd::Link) => self.plain_depth -= 1,
            Event::Text(text) if self.plain_depth == 0 => {
                self.link_names(text, out);
                return 1;
            }
            Event::Code(code) if self.plain_depth == 0 => {
                out.push(self.render_code(code));
                return 1;
            }
            _ => {}
        }
        out.push(events[0].clone());
        1
    }

    /// Returns the anchor of the next heading. One whose text occurred before ends in its number, as on GitHub.
    fn make_anchor(&self, heading: &str) -> String {
        let anchor = heading_anchor(heading);
        let is_same = |(text, _): &&(String, String)| heading_anchor(text) == anchor;
        match self.rendered.headings.iter().filter(is_same).count() {
            0 => anchor,
            n => format!("{anchor}-{n}"),
        }
    }

    /// Returns whether the page is the one that states this rule.
    fn defines_rule(&self, id: &str) -> bool {
        self.references.page_of(id) == Some(self.path.as_str()) && self.plain_depth == 0
    }

    /// Pushes a text with its rule ids and codes as links.
    fn link_names<'e>(&mut self, text: &CowStr<'e>, out: &mut Vec<Event<'e>>) {
        for (plain, name) in self.references.split_names(text) {
            if !plain.is_empty() {
                out.push(Event::Text(plain.to_string().into()));
            }
            let Some(name) = name else { continue };
            self.rendered.targets.extend(self.references.page_of(name).map(str::to_string));
            out.push(match self.references.link_to(name, &self.path) {
                Some(link) => to_html(html! { a href=(link) { (name) } }),
                None => Event::Text(name.to_string().into()),
            });
        }
    }

    /// Renders a code span: the name of a drill is a link to it, and on the page of drills its anchor.
    fn render_code<'e>(&mut self, code: &CowStr<'e>) -> Event<'e> {
        let drill = code.strip_prefix("tessera drill ").unwrap_or(code);
        match self.references.link_to(drill, &self.path) {
            _ if self.path == DRILLS && self.references.page_of(code).is_some() => {
                to_html(html! { code id=(code) { (code) } })
            }
            Some(link) => {
                self.rendered.targets.extend(self.references.page_of(drill).map(str::to_string));
                to_html(html! { a href=(link) { code { (code) } } })
            }
            None => Event::Code(code.clone()),
        }
    }

    /// Points a link at a page of the site, or at the repository if the site does not contain the target.
    fn rewrite_link(&mut self, link: &str) -> String {
        let Some(Target { path, anchor }) = resolve_link(self.page.path, link) else {
            return link.to_string();
        };
        let anchor = if anchor.is_empty() { String::new() } else { format!("#{anchor}") };
        let is_picture = crate::embedded::PICTURES.iter().any(|(p, _)| *p == path);
        if Page::from_path(&path).is_some() || is_picture {
            let target = site_path(&path);
            let path = if target == self.path { String::new() } else { relative_link(&self.path, &target) };
            self.rendered.targets.insert(target);
            return format!("{path}{anchor}");
        }
        // A folder of pages is a section of the index.
        match path.strip_prefix("docs/").and_then(|folder| folder.rsplit('/').next()) {
            Some(folder @ ("explainers" | "topics" | "cards" | "design" | "manual" | "guides")) => {
                format!("{}#{folder}", relative_link(&self.path, "index.html"))
            }
            _ => format!("{REPOSITORY}/blob/main/{path}{anchor}"),
        }
    }
}

/// Returns the text of the heading that begins the events.
fn heading_text(events: &[Event<'_>]) -> String {
    let inner = events.iter().take_while(|e| !matches!(e, Event::End(TagEnd::Heading(_))));
    inner
        .filter_map(|e| match e {
            Event::Text(t) | Event::Code(t) => Some(t.to_string()),
            _ => None,
        })
        .collect()
}

fn to_html(markup: Markup) -> Event<'static> {
    Event::InlineHtml(markup.into_string().into())
}
