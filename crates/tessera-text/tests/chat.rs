//! Chat templates against transformers, and what a template reports.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test reads its fixtures")]

use std::path::Path;

use serde_json::Value;
use tessera_text::{ChatMessage, ChatTemplate, ChatTokens};

fn tokens() -> ChatTokens {
    ChatTokens { begin: Some("<|begin|>".to_string()), end: Some("<|eos|>".to_string()) }
}

fn user(text: &str) -> ChatMessage {
    ChatMessage { role: "user".to_string(), content: text.to_string() }
}

#[test]
fn templates_write_what_transformers_writes_and_refuse_what_it_refuses() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/chat");
    let rows: Vec<Value> =
        serde_json::from_str(&std::fs::read_to_string(dir.join("expected.json")).unwrap()).unwrap();
    let (mut texts, mut refusals) = (0, 0);
    for row in &rows {
        let text = |key: &str| row[key].as_str();
        let file = text("template").unwrap();
        let source = std::fs::read_to_string(dir.join(file)).unwrap();
        let messages = row["messages"].as_array().unwrap().iter().map(|m| {
            let text = |key: &str| m[key].as_str().unwrap().to_string();
            ChatMessage { role: text("role"), content: text("content") }
        });
        let found = ChatTemplate::parse(file, &source, tokens())
            .unwrap()
            .render(&messages.collect::<Vec<_>>(), 1_700_000_000);
        match (found, text("text"), text("refused")) {
            (Ok(found), Some(expected), None) => {
                assert_eq!(found, expected, "{file}, {}", row["case"]);
                texts += 1;
            }
            (Err(d), None, Some(why)) => {
                assert!(d.code.id == "T0453" && d.message.contains(why), "{d:?}");
                assert!(d.labels[0].location.starts_with(&format!("{file}:")), "{d:?}");
                refusals += 1;
            }
            (found, ..) => panic!("{file}, {}: {found:?}", row["case"]),
        }
    }
    assert!(texts >= 7 && refusals >= 2, "{texts} texts, {refusals} refusals");
}

#[test]
fn a_template_that_is_no_template_is_refused_with_its_line() {
    let parse = |source: &str| ChatTemplate::parse("t.jinja", source, tokens());
    let d = parse("{{ bos_token }}\n{% for x in %}").unwrap_err();
    assert_eq!((d.code.id, d.labels[0].location.as_str()), ("T0453", "t.jinja:2"));
    let d = parse("a\n\n{{ nothing() }}").unwrap().render(&[user("x")], 0).unwrap_err();
    assert_eq!((d.code.id, d.labels[0].location.as_str()), ("T0453", "t.jinja:3"));
    let endless =
        "{% for a in range(9999) %}{% for b in range(9999) %}{% set c = a %}{% endfor %}{% endfor %}";
    let d = parse(endless).unwrap().render(&[user("x")], 0).unwrap_err();
    assert_eq!(d.code.id, "T0453");
}

#[test]
fn the_time_is_the_one_that_the_caller_states() {
    let template = ChatTemplate::parse("t", "{{ strftime_now('%d %b %Y') }}", tokens()).unwrap();
    assert_eq!(template.render(&[user("x")], 1_700_000_000).unwrap(), "14 Nov 2023");
}
