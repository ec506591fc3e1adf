//! Links between pages: their targets, and the anchors of headings.

/// A target of a link below the root of the repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    /// Path such as `docs/manual/kv.md`.
    pub(crate) path: String,
    /// Anchor without the `#`; empty for the page itself.
    pub(crate) anchor: String,
}

/// Resolves a link of a page. Returns `None` for an address outside of the project.
pub(crate) fn resolve_link(page: &str, link: &str) -> Option<Target> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let mut parts: Vec<&str> = page.split('/').collect();
    if !path.is_empty() {
        parts.pop();
        for part in path.split('/') {
            match part {
                "" | "." => {}
                ".." => drop(parts.pop()),
                name => parts.push(name),
            }
        }
    }
    Some(Target { path: parts.join("/"), anchor: anchor.to_string() })
}

/// Returns the anchor of a heading, as GitHub makes it: lower case, spaces as hyphens, no other
/// punctuation.
pub(crate) fn heading_anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect::<String>().to_lowercase()
}

/// Returns the link from one file to another below a common root.
pub(crate) fn relative_link(from: &str, to: &str) -> String {
    let (from, to): (Vec<&str>, Vec<&str>) = (from.split('/').collect(), to.split('/').collect());
    let folders = &from[..from.len() - 1];
    let shared = folders.iter().zip(&to[..to.len() - 1]).take_while(|(a, b)| a == b).count();
    let up = folders[shared..].iter().map(|_| "..");
    up.chain(to[shared..].iter().copied()).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_resolved_from_its_page() {
        let resolve = |link| resolve_link("docs/manual/kv.md", link).map(|t| (t.path, t.anchor));
        let target = |path: &str, anchor: &str| Some((path.to_string(), anchor.to_string()));
        assert_eq!(
            resolve("../library/cards/gpipe.md#gpipe-2"),
            target("docs/library/cards/gpipe.md", "gpipe-2")
        );
        assert_eq!(resolve("#details"), target("docs/manual/kv.md", "details"));
        assert_eq!(resolve("./groups.md"), target("docs/manual/groups.md", ""));
        assert_eq!(resolve("https://example.org/a.md"), None);
    }

    #[test]
    fn headings_have_the_anchors_of_github() {
        assert_eq!(heading_anchor("Stashed, recomputed or sent"), "stashed-recomputed-or-sent");
        assert_eq!(heading_anchor("What `tessera check` proves"), "what-tessera-check-proves");
        assert_eq!(heading_anchor("nccl-3"), "nccl-3");
    }

    #[test]
    fn relative_links_lead_from_file_to_file() {
        assert_eq!(relative_link("manual/kv.html", "library/cards/a.html"), "../library/cards/a.html");
        assert_eq!(relative_link("index.html", "manual/kv.html"), "manual/kv.html");
        assert_eq!(relative_link("manual/kv.html", "manual/groups.html"), "groups.html");
    }
}
