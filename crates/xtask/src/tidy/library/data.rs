//! Renders the data of `tessera explain`, so that the binary answers without the repository.

use serde_json::{Value, json};

use super::cards::Card;
use super::claims::find_users;
use super::{Library, Rule};

/// Renders rules, drills, pages of codes, symptoms, topics, explainers, cards and questions as JSON, with
/// one entry per line. Texts keep the
/// Markdown of their pages; the binary removes it.
pub(super) fn render_json(library: &Library) -> String {
    let rules = library.rules.iter().map(|r| rule_value(r, library));
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
    let topics = library.topics.iter().map(|t| {
        json!({"number": t.number, "name": t.name, "title": t.title, "page": t.path, "status": t.status,
            "rules": t.rules, "claims": t.claims})
    });
    let explainers = library.explainers.iter().map(|e| {
        json!({"number": e.number, "name": e.name, "title": e.title, "page": e.path, "status": e.status,
            "topics": e.topics, "cards": e.cards, "rules": e.rules, "drills": e.drills})
    });
    let cards = library.cards.iter().map(|c| card_value(c, library));
    let questions = library.questions.iter().map(|q| {
        json!({"id": q.id, "question": q.question, "answer": q.answer, "drills": q.drills, "pages": q.pages})
    });
    let lists = [
        render_list("rules", rules),
        render_list("drills", drills),
        render_list("codes", codes),
        render_list("symptoms", symptoms),
        render_list("topics", topics),
        render_list("explainers", explainers),
        render_list("cards", cards),
        render_list("questions", questions),
    ];
    format!("{{\n{}\n}}\n", lists.join(",\n"))
}

fn rule_value(rule: &Rule, library: &Library) -> Value {
    let topics = library.topics.iter().filter(|t| t.rules.contains(&rule.id)).map(|t| &t.number);
    let explainers = library.explainers.iter().filter(|e| e.rules.contains(&rule.id)).map(|e| &e.number);
    json!({"id": rule.id, "page": rule.page.name(), "forbidden": rule.is_forbidden, "text": rule.text,
        "codes": rule.proof.codes, "drills": rule.proof.drills, "claims": rule.claims,
        "topics": topics.collect::<Vec<_>>(), "explainers": explainers.collect::<Vec<_>>()})
}

fn card_value(card: &Card, library: &Library) -> Value {
    let claims = card.claims.iter().map(|c| {
        let users = find_users(&c.id, library);
        let users: Vec<Value> = users.iter().map(|u| json!({"kind": u.kind, "id": u.id})).collect();
        json!({"id": c.id, "text": c.text, "at": c.at, "read_again": c.is_read_again(), "users": users})
    });
    json!({"name": card.name, "title": card.title, "page": card.path, "status": card.status,
        "source": card.source(), "version": card.field("version"), "read": card.field("read"),
        "claims": claims.collect::<Vec<_>>()})
}

fn render_list(name: &str, entries: impl Iterator<Item = Value>) -> String {
    let lines: Vec<String> = entries.map(|e| e.to_string()).collect();
    format!("\"{name}\": [\n{}\n]", lines.join(",\n"))
}
