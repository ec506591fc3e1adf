//! Renders the data of `tessera explain`, so that the binary answers without the repository.

use serde_json::{Value, json};

use super::Library;

/// Renders rules, drills, pages of codes and symptoms as JSON, with one entry per line. Texts keep the
/// Markdown of their pages; the binary removes it.
pub(super) fn render_json(library: &Library) -> String {
    let rules = library.rules.iter().map(|r| {
        json!({"id": r.id, "page": r.page.name(), "forbidden": r.is_forbidden, "text": r.text,
            "codes": r.proof.codes, "drills": r.proof.drills})
    });
    let drills = library.drills.iter().map(|d| {
        let rules: Vec<&str> = library.rules_of_drill(&d.id).map(|r| r.id.as_str()).collect();
        json!({"id": d.id, "code": d.code, "rank": d.rank, "place": d.place, "fault": d.fault, "page": d.page,
            "rules": rules})
    });
    let codes = library.codes.iter().map(|(id, row)| {
        let page =
            row.page.clone().or_else(|| Some(library.rules_of_code(id).next()?.page.name().to_string()));
        json!({"id": id, "page": page})
    });
    let symptoms = library.symptoms.iter().map(|s| {
        json!({"title": s.title, "words": s.words, "what": s.what, "first": s.first,
            "codes": s.codes, "drills": s.drills, "pages": s.pages})
    });
    let lists = [
        render_list("rules", rules),
        render_list("drills", drills),
        render_list("codes", codes),
        render_list("symptoms", symptoms),
    ];
    format!("{{\n{}\n}}\n", lists.join(",\n"))
}

fn render_list(name: &str, entries: impl Iterator<Item = Value>) -> String {
    let lines: Vec<String> = entries.map(|e| e.to_string()).collect();
    format!("\"{name}\": [\n{}\n]", lines.join(",\n"))
}
