//! Finds what a question names: a code, a rule, a drill, a page or a symptom.

use tessera_base::{Code, Diagnostic, Registry, closest_name};

use super::library::{Drill, Library, PAGES, Page, Rule, Symptom};
use crate::codes::T0032;

/// Maximum number of answers to a question that names several things.
const MAX_ANSWERS: usize = 3;
/// Maximum number of suggested codes.
const MAX_CODES: usize = 4;
/// Words that a question may contain and that distinguish nothing: `the exit status 13` is
/// `exit 13`.
const FILLERS: [&str; 10] = ["the", "a", "an", "is", "are", "my", "our", "code", "status", "why"];

/// A thing that can be explained.
#[derive(Debug, Clone, Copy)]
pub(super) enum Topic<'a> {
    Code(&'static Code),
    Rule(&'a Rule),
    Drill(&'a Drill),
    Page(Page),
    Symptom(&'a Symptom),
}

impl Topic<'_> {
    /// The kind of the topic, in a word.
    fn kind(&self) -> &'static str {
        match self {
            Topic::Code(_) => "code",
            Topic::Rule(_) => "rule",
            Topic::Drill(_) => "drill",
            Topic::Page(_) => "page",
            Topic::Symptom(_) => "symptom",
        }
    }

    /// The names by which the topic is found, the usual one first.
    fn names(&self) -> Vec<&str> {
        match self {
            Topic::Code(c) => vec![c.id],
            Topic::Rule(r) => vec![&r.id],
            Topic::Drill(d) => vec![&d.id],
            Topic::Page(p) => vec![p.name, p.title()],
            Topic::Symptom(s) => s.words.iter().chain([&s.title]).map(String::as_str).collect(),
        }
    }

    /// One line about the topic.
    fn summary(&self) -> &str {
        match self {
            Topic::Code(c) => c.title,
            Topic::Rule(r) => r.text.split(" (").next().unwrap_or(&r.text),
            Topic::Drill(d) => &d.fault,
            Topic::Page(p) => p.title(),
            Topic::Symptom(s) => &s.title,
        }
    }
}

/// Returns everything that can be explained.
fn all_topics<'a>(library: &'a Library, registry: &Registry) -> Vec<Topic<'a>> {
    let codes = registry.iter().map(Topic::Code);
    let rules = library.rules.iter().map(Topic::Rule);
    let drills = library.drills.iter().map(Topic::Drill);
    let symptoms = library.symptoms.iter().map(Topic::Symptom);
    codes.chain(rules).chain(drills).chain(PAGES.into_iter().map(Topic::Page)).chain(symptoms).collect()
}

/// Returns the lower-case words of a text without [`FILLERS`]; hyphens separate words.
fn words_of(text: &str) -> Vec<String> {
    let words = text.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty());
    words.map(str::to_lowercase).filter(|w| !FILLERS.contains(&w.as_str())).collect()
}

/// Finds the topics with the name in the question. Without one, finds those whose name consists of
/// words of the question, and returns those with the longest name.
///
/// # Errors
/// Returns T0032 with the nearest names of each kind if nothing is found.
pub(super) fn find_topics<'a>(
    question: &str,
    library: &'a Library,
    registry: &Registry,
) -> Result<Vec<Topic<'a>>, Diagnostic> {
    let asked = words_of(question);
    let topics = all_topics(library, registry);
    let with_name = |is_meant: &dyn Fn(&[String]) -> bool| -> Vec<(usize, Topic<'a>)> {
        let length = |t: &Topic<'a>| {
            t.names()
                .into_iter()
                .map(words_of)
                .filter(|n| !n.is_empty() && is_meant(n))
                .map(|n| n.len())
                .max()
        };
        topics.iter().filter_map(|t| Some((length(t)?, *t))).collect()
    };
    let mut named = with_name(&|name| *name == asked);
    if named.is_empty() {
        named = with_name(&|name| name.iter().all(|w| asked.contains(w)));
        let longest = named.iter().map(|(length, _)| *length).max().unwrap_or_default();
        named.retain(|(length, _)| *length == longest);
    }
    named.truncate(MAX_ANSWERS);
    if named.is_empty() {
        return Err(unknown_question(question, &topics));
    }
    Ok(named.into_iter().map(|(_, topic)| topic).collect())
}

/// Names the nearest topics of each kind.
fn unknown_question(question: &str, topics: &[Topic<'_>]) -> Diagnostic {
    let near_codes = nearest_codes(question, topics);
    let text = match near_codes.is_empty() {
        true => format!("this build does not know `{question}`"),
        false => format!("no code `{question}` in this build"),
    };
    let mut d = Diagnostic::error(&T0032, text);
    for code in near_codes {
        d = d.with_label(code.id, code.title);
    }
    for kind in ["rule", "drill", "page", "symptom"] {
        if let Some((name, topic)) = nearest_topic(question, kind, topics) {
            d = d.with_label(format!("{kind} `{name}`"), topic.summary());
        }
    }
    d.with_hint("`tessera explain` lists all codes, pages and symptoms")
}

/// Returns the codes with the nearest numbers, if the question looks like a code.
fn nearest_codes(question: &str, topics: &[Topic<'_>]) -> Vec<&'static Code> {
    let digits = |s: &str| {
        s.chars().filter_map(|c| c.to_digit(10)).fold(0i64, |n, d| (n * 10 + i64::from(d)) % 1_000_000)
    };
    let is_like_code = question.trim().len() >= 3
        && !question.trim().contains(char::is_whitespace)
        && question.chars().filter(char::is_ascii_digit).count() >= 3;
    if !is_like_code {
        return Vec::new();
    }
    let mut codes: Vec<&'static Code> = topics
        .iter()
        .filter_map(|t| match t {
            Topic::Code(c) => Some(*c),
            _ => None,
        })
        .collect();
    codes.sort_by_key(|c| ((digits(c.id) - digits(question)).abs(), c.id));
    codes.truncate(MAX_CODES);
    codes
}

/// Returns the name of a kind that is spelled most like the question, or else the one that shares the
/// most words with it.
fn nearest_topic<'t, 'a>(
    question: &str,
    kind: &str,
    topics: &'t [Topic<'a>],
) -> Option<(&'t str, &'t Topic<'a>)> {
    let asked = words_of(question);
    let own = || {
        topics.iter().filter(|t| t.kind() == kind).flat_map(|t| t.names().into_iter().map(move |n| (n, t)))
    };
    let names: Vec<String> = own().map(|(n, _)| words_of(n).join(" ")).collect();
    if let Some(nearest) = closest_name(&asked.join(" "), names.iter().map(String::as_str)) {
        return own().zip(&names).find(|(_, n)| n.as_str() == nearest).map(|(found, _)| found);
    }
    let shared = |name: &str| words_of(name).iter().filter(|w| asked.contains(w)).count();
    let by_words = own().map(|(n, t)| (shared(n), n, t)).filter(|(count, ..)| *count > 0);
    // Of several names with as many words in common, the first one is the usual name.
    let best = by_words.reduce(|best, other| if other.0 > best.0 { other } else { best });
    best.map(|(_, name, topic)| (name, topic))
}
