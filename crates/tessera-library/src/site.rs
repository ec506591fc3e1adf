//! All pages as one site: files that link only to one another, for any browser and without a network.

mod index;
mod layout;
mod markdown;
mod references;

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::Code;

use crate::data::Library;
use crate::embedded::PICTURES;
use crate::page::{Page, all_pages};
use layout::{BackLink, render_code_page, render_page};
use markdown::render_markdown;
use references::References;

/// A file of the site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SiteFile {
    /// Path below the folder of the site, such as `manual/kv.html`.
    pub path: String,
    /// Contents of the file.
    pub bytes: Vec<u8>,
}

/// Renders the site. `codes` are all diagnostic codes, each with the area that raises it.
#[must_use]
pub fn render_site(library: &Library, codes: &[(&Code, &str)]) -> Vec<SiteFile> {
    let references = References::new(library, codes);
    let mut files: Vec<SiteFile> = PICTURES
        .iter()
        .map(|(path, bytes)| SiteFile { path: site_path(path), bytes: bytes.to_vec() })
        .collect();
    let rendered: Vec<(Page, markdown::Rendered)> =
        all_pages().map(|page| (page, render_markdown(page, &references))).collect();
    let back_links = collect_back_links(&rendered, library, codes);
    let none = BTreeSet::new();
    for (page, contents) in &rendered {
        let path = site_path(page.path);
        let links = back_links.get(&path).unwrap_or(&none);
        let html = render_page(*page, &path, contents, links, library);
        files.push(SiteFile { path, bytes: html.into_bytes() });
    }
    for (code, area) in codes {
        let path = references::code_path(code.id);
        let links = back_links.get(&path).unwrap_or(&none);
        let html = render_code_page(code, area, &path, library, &references, links);
        files.push(SiteFile { path, bytes: html.into_bytes() });
    }
    let entries = index::list_entries(library, codes, &rendered, &references);
    files
        .push(SiteFile { path: "search.js".to_string(), bytes: index::render_script(&entries).into_bytes() });
    let html = index::render_index(library, codes);
    files.push(SiteFile { path: "index.html".to_string(), bytes: html.into_bytes() });
    files
}

/// Returns the path in the site of a file below `docs/`.
fn site_path(path: &str) -> String {
    let path = path.strip_prefix("docs/").unwrap_or(path);
    path.strip_suffix(".md").map_or(path.to_string(), |stem| format!("{stem}.html"))
}

/// Returns for each page the pages that link to it. The page of a code counts as a link to the manual page
/// on which the code stands.
fn collect_back_links(
    rendered: &[(Page, markdown::Rendered)],
    library: &Library,
    codes: &[(&Code, &str)],
) -> BTreeMap<String, BTreeSet<BackLink>> {
    let mut back_links: BTreeMap<String, BTreeSet<BackLink>> = BTreeMap::new();
    for (page, contents) in rendered {
        let path = site_path(page.path);
        for target in contents.targets.iter().filter(|t| **t != path) {
            let from = BackLink { title: page.title().to_string(), path: path.clone() };
            back_links.entry(target.clone()).or_default().insert(from);
        }
    }
    for (code, _) in codes {
        let from =
            BackLink { title: format!("{}: {}", code.id, code.title), path: references::code_path(code.id) };
        if let Some(page) = library.page_of_code(code.id).and_then(Page::from_name) {
            back_links.entry(site_path(page.path)).or_default().insert(from.clone());
        }
    }
    back_links
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::resolve_link;

    tessera_base::codes! {
        T0743: "a rank is alive and makes no progress", "Some page.\n\nRead D-03 and T0744.";
        T0744: "<b>escaped</b>", "Text.";
    }

    fn render() -> Vec<SiteFile> {
        let codes: Vec<(&Code, &str)> = CODES.iter().map(|c| (*c, "lockstep runtime")).collect();
        render_site(&Library::read().unwrap(), &codes)
    }

    fn text_of<'a>(files: &'a [SiteFile], path: &str) -> &'a str {
        let file = files.iter().find(|f| f.path == path).unwrap_or_else(|| panic!("no {path}"));
        std::str::from_utf8(&file.bytes).unwrap()
    }

    /// Every `href` and `src` of a page, without those that leave the site.
    fn links(html: &str) -> Vec<&str> {
        ["href=\"", "src=\""]
            .iter()
            .flat_map(|a| html.split(a).skip(1))
            .filter_map(|rest| rest.split('"').next())
            .filter(|link| !link.contains("://"))
            .collect()
    }

    #[test]
    fn every_link_and_anchor_of_the_site_exists() {
        let files = render();
        let pages: Vec<&SiteFile> = files.iter().filter(|f| f.path.ends_with(".html")).collect();
        let mut broken = Vec::new();
        for page in &pages {
            for link in links(text_of(&files, &page.path)) {
                let target = resolve_link(&page.path, link).unwrap();
                let exists = files.iter().any(|f| f.path == target.path);
                let has_anchor = exists
                    && (target.anchor.is_empty()
                        || text_of(&files, &target.path).contains(&format!(" id=\"{}\"", target.anchor)));
                if !has_anchor {
                    broken.push(format!("{}: {link}", page.path));
                }
            }
        }
        assert!(broken.is_empty(), "{}", broken.join("\n"));
        assert!(pages.len() > 60, "{}", pages.len());
    }

    #[test]
    fn rules_codes_and_drills_are_links_and_have_back_links() {
        let files = render();
        let page = text_of(&files, "manual/shutdown.html");
        assert!(page.contains("<a href=\"../codes/T0743.html\">T0743</a>"), "{page}");
        assert!(page.contains("id=\"S-01\""));
        assert!(page.contains("../reference/drills.html#stopped-rank"));
        assert!(page.contains("Linked from"));
        let code = text_of(&files, "codes/T0743.html");
        assert!(code.contains("../manual/determinism.html#D-03") && code.contains("T0744.html"), "{code}");
        assert!(text_of(&files, "codes/T0744.html").contains("&lt;b&gt;escaped"));
    }

    #[test]
    fn the_search_finds_rules_codes_drills_and_symptoms() {
        let files = render();
        let script = text_of(&files, "search.js");
        for part in ["codes/T0743.html", "manual/determinism.html#D-03", "#stopped-rank", "black frames"] {
            assert!(script.contains(part), "{part}");
        }
    }

    #[test]
    fn the_site_loads_nothing_from_elsewhere() {
        for file in render().iter().filter(|f| f.path.ends_with(".html")) {
            let html = std::str::from_utf8(&file.bytes).unwrap();
            for tag in ["<script src=\"http", "<link ", "<img src=\"http", "@import"] {
                assert!(!html.contains(tag), "{}: {tag}", file.path);
            }
        }
    }
}
