//! Where rules, codes and drills stand in the site, so that each mention becomes a link.

use std::collections::BTreeMap;

use tessera_base::Code;

use super::site_path;
use crate::data::Library;
use crate::link::relative_link;
use crate::page::Page;

/// The page that lists every drill.
pub(super) const DRILLS: &str = "reference/drills.html";

/// Places in the site by name.
pub(super) struct References {
    /// Path and anchor by rule id, code or drill.
    places: BTreeMap<String, (String, String)>,
}

impl References {
    pub(super) fn new(library: &Library, codes: &[(&Code, &str)]) -> References {
        let rule_place =
            |page: &str, id: &str| Some((site_path(Page::from_name(page)?.path), id.to_string()));
        let rules = library.rules.iter().filter_map(|r| Some((r.id.clone(), rule_place(&r.page, &r.id)?)));
        let codes = codes.iter().map(|(c, _)| (c.id.to_string(), (code_path(c.id), String::new())));
        let drills = library.drills.iter().map(|d| (d.id.clone(), (DRILLS.to_string(), d.id.clone())));
        References { places: rules.chain(codes).chain(drills).collect() }
    }

    /// Returns the page on which a rule, code or drill stands.
    pub(super) fn page_of(&self, name: &str) -> Option<&str> {
        self.places.get(name).map(|(path, _)| path.as_str())
    }

    /// Returns the link from a page of the site to a rule, a code or a drill.
    pub(super) fn link_to(&self, name: &str, from: &str) -> Option<String> {
        let (path, anchor) = self.places.get(name)?;
        let path = if path == from { String::new() } else { relative_link(from, path) };
        let anchor = if anchor.is_empty() { String::new() } else { format!("#{anchor}") };
        Some(format!("{path}{anchor}")).filter(|link| !link.is_empty())
    }

    /// Splits a text at the rule ids and codes that stand in it: pairs of plain text and a name.
    pub(super) fn split_names<'t>(&self, text: &'t str) -> Vec<(&'t str, Option<&'t str>)> {
        let is_part = |c: char| c.is_alphanumeric() || c == '-' || c == '_';
        let (mut parts, mut plain_from, mut at) = (Vec::new(), 0, 0);
        while let Some(start) = text[at..].find(is_part).map(|n| at + n) {
            let end = text[start..].find(|c| !is_part(c)).map_or(text.len(), |n| start + n);
            let word = &text[start..end];
            if word.starts_with(|c: char| c.is_ascii_uppercase()) && self.places.contains_key(word) {
                parts.push((&text[plain_from..start], Some(word)));
                plain_from = end;
            }
            at = end;
        }
        parts.push((&text[plain_from..], None));
        parts
    }
}

/// Returns the path of a code's page in the site.
pub(super) fn code_path(id: &str) -> String {
    format!("codes/{id}.html")
}
