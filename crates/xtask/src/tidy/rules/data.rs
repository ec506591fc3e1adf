//! Renders the data of `tessera explain`, so that the binary answers without the repository.

use serde_json::{Value, json};

use super::Library;

/// Renders rules, drills, pages of codes and symptoms as JSON, with one entry per line.
pub(super) fn render_json(library: &Library) -> String {
    let rules = library.rules.iter().map(|r| {
        json!({"id": r.id, "page": r.page.name(), "forbidden": r.is_forbidden, "text": strip_markup(&r.text),
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
        json!({"title": s.title, "words": s.words, "what": strip_markup(&s.what), "first": strip_markup(&s.first),
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

/// Replaces each link `[text](target)` by its text and drops the stars of emphasis; back quotes
/// stay, because they mark what to type.
fn strip_markup(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, link)) = rest.split_once('[') {
        out += before;
        let parts = link.split_once("](").and_then(|(name, end)| Some((name, end.split_once(')')?.1)));
        match parts {
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
}
