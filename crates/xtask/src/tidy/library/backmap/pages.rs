//! The part of the back map that is about topics, explainers, cards and the seven questions.

use std::fmt::Write as _;

use super::super::claims::find_users;
use super::super::references::CARDS;
use super::super::topics::Topic;
use super::super::{Library, RULE_PAGES, Rule};
use super::{first_sentence, link_to};

/// Renders the number of pages by kind and status.
pub(super) fn render_counts(library: &Library) -> String {
    let mut out = "| kind | ready | draft | stub |\n| --- | --- | --- | --- |\n".to_string();
    for (kind, statuses) in list_statuses(library) {
        let count = |status: &str| statuses.iter().filter(|(_, s)| *s == status).count();
        let _ = writeln!(out, "| {kind} | {} | {} | {} |", count("ready"), count("draft"), count("stub"));
    }
    let claims = || library.cards.iter().flat_map(|c| &c.claims);
    let read_again = claims().filter(|c| c.is_read_again()).count();
    let _ =
        writeln!(out, "\nClaims of cards: {}, of which {read_again} were read again.\n", claims().count());
    out
}

/// Renders the pages that are not ready, and the claims that nobody read again.
pub(super) fn render_gaps(library: &Library) -> String {
    let mut out = "## Stubs and gaps\n\n".to_string();
    let mut gaps: Vec<String> = Vec::new();
    for (_, statuses) in list_statuses(library) {
        let not_ready = statuses.iter().filter(|(_, status)| *status != "ready");
        gaps.extend(not_ready.map(|(path, status)| format!("{} is a {status}.", link_page(path))));
    }
    let not_read = library.cards.iter().flat_map(|c| &c.claims).filter(|c| !c.is_read_again());
    gaps.extend(not_read.map(|c| format!("{}: {}", link_claim(&c.id, library), c.at)));
    if gaps.is_empty() {
        out += "None.\n";
    }
    gaps.iter().for_each(|gap| out += &format!("- {gap}\n"));
    out + "\n"
}

/// Renders the seven questions with their drills, pages and topics.
pub(super) fn render_questions(library: &Library) -> String {
    let mut out = "## Seven questions\n\n| question | drills | pages | topics |\n| --- | --- | --- | --- |\n"
        .to_string();
    for q in &library.questions {
        let pages = RULE_PAGES.iter().filter(|p| q.pages.iter().any(|name| name == p.name()));
        let pages: Vec<&str> = pages.map(|p| p.path).collect();
        let topics = library.topics.iter().filter(|t| pages.contains(&t.path.as_str()));
        let _ = writeln!(
            out,
            "| {}: {} | {} | {} | {} |",
            q.id,
            q.question,
            q.drills.join(", "),
            join_texts(pages.iter().map(|path| link_page(path))),
            join_texts(topics.map(link_topic))
        );
    }
    out + "\n"
}

/// Renders each explainer with its rules, what shows them, their topics and the claims behind them.
pub(super) fn render_explainers(library: &Library) -> String {
    let mut out = String::new();
    for explainer in &library.explainers {
        let heading = format!("## Explainer {} {}", explainer.number, explainer.name);
        let _ = writeln!(
            out,
            "{heading}\n\n[{}]({}) is {}.\n\n| rule | states | shown by | topics | claims |\n\
| --- | --- | --- | --- | --- |",
            explainer.title,
            link_to(&explainer.path),
            explainer.status
        );
        for rule in library.rules.iter().filter(|r| explainer.rules.contains(&r.id)) {
            let topics = library.topics.iter().filter(|t| t.rules.contains(&rule.id));
            let _ = writeln!(
                out,
                "| {} | {} | {} | {} | {} |",
                rule.id,
                first_sentence(rule),
                render_proof(rule),
                join_texts(topics.map(link_topic)),
                join_texts(rule.claims.iter().map(|id| link_claim(id, library)))
            );
        }
        let topics = library.topics.iter().filter(|t| explainer.topics.contains(&t.number));
        let _ = writeln!(
            out,
            "\n- Drills: {}\n- Topics: {}\n- Cards: {}\n- Claims on the page: {}\n",
            fill_empty(explainer.drills.join(", ")),
            fill_empty(join_texts(topics.map(link_topic))),
            fill_empty(join_texts(
                explainer.cards.iter().map(|name| format!("[{name}]({})", link_card(name)))
            )),
            fill_empty(join_texts(explainer.claims.iter().map(|id| link_claim(id, library))))
        );
    }
    out
}

/// Renders each topic with its rules, explainers and claims.
pub(super) fn render_topics(library: &Library) -> String {
    let mut out =
        "## Topics\n\n| topic | status | rules | explainers | claims |\n| --- | --- | --- | --- | --- |\n"
            .to_string();
    for topic in &library.topics {
        let explainers = library.explainers.iter().filter(|e| e.topics.contains(&topic.number));
        let explainers = explainers.map(|e| format!("[{}]({})", e.number, link_to(&e.path)));
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} |",
            link_topic(topic),
            topic.status,
            topic.rules.join(", "),
            join_texts(explainers),
            join_texts(topic.claims.iter().map(|id| link_claim(id, library)))
        );
    }
    out + "\n"
}

/// Renders each claim with its place and its users.
pub(super) fn render_claims(library: &Library) -> String {
    let mut out = "## Claims\n\n| claim | states | at | users |\n| --- | --- | --- | --- |\n".to_string();
    for claim in library.cards.iter().flat_map(|c| &c.claims) {
        let users = find_users(&claim.id, library);
        let users = users.iter().map(|u| match u.kind {
            "rule" => u.id.to_string(),
            kind => format!("{kind} {}", u.id),
        });
        let escape = |text: &str| text.replace('|', "\\|");
        let link = link_claim(&claim.id, library);
        let _ = writeln!(
            out,
            "| {link} | {} | {} | {} |",
            escape(&claim.text),
            escape(&claim.at),
            join_texts(users)
        );
    }
    out + "\n"
}

/// Path and status of each page, by kind.
fn list_statuses(library: &Library) -> [(&'static str, Vec<(&str, &str)>); 4] {
    let rules = RULE_PAGES.iter().zip(&library.statuses).map(|(p, s)| (p.path, s.as_str()));
    // A page of the manual that is a topic counts once, among the pages with rules.
    let topics = library.topics.iter().filter(|t| !RULE_PAGES.iter().any(|p| p.path == t.path));
    [
        ("pages with rules", rules.collect()),
        ("other topics", topics.map(|t| (t.path.as_str(), t.status.as_str())).collect()),
        ("explainers", library.explainers.iter().map(|e| (e.path.as_str(), e.status.as_str())).collect()),
        ("cards", library.cards.iter().map(|c| (c.path.as_str(), c.status.as_str())).collect()),
    ]
}

/// The drills, tests and filetests of a rule.
fn render_proof(rule: &Rule) -> String {
    let drills = rule.proof.drills.iter().map(|d| format!("drill {d}"));
    let tests = rule.proof.tests.iter().map(|t| format!("test {t}"));
    let filetests = rule.proof.filetests.iter().map(|f| format!("filetest {f}"));
    fill_empty(join_texts(drills.chain(tests).chain(filetests)))
}

fn link_topic(topic: &Topic) -> String {
    format!("[{} {}]({})", topic.number, topic.name, link_to(&topic.path))
}

fn link_page(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    format!("[{}]({})", file.trim_end_matches(".md"), link_to(path))
}

/// The link to a claim; its id alone if no card has it.
fn link_claim(id: &str, library: &Library) -> String {
    let card = library.cards.iter().find(|c| c.claims.iter().any(|claim| claim.id == id));
    card.map_or(id.to_string(), |card| format!("[{id}]({}#{id})", link_to(&card.path)))
}

fn link_card(name: &str) -> String {
    link_to(&format!("{CARDS}{name}.md"))
}

fn join_texts(texts: impl Iterator<Item = String>) -> String {
    texts.collect::<Vec<_>>().join(", ")
}

fn fill_empty(text: String) -> String {
    if text.is_empty() { "none".to_string() } else { text }
}
