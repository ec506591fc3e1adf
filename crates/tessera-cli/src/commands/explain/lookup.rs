//! Finds what a question names: a code, a rule, a drill, a page, a topic, an explainer, a card, a claim
//! or a symptom.

use tessera_base::{Code, Diagnostic, Registry, closest_name};
use tessera_library::{Card, Claim, Drill, Explainer, Library, Page, Rule, Symptom, Topic, all_pages};

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
pub(super) enum Subject<'a> {
    Code(&'static Code),
    Rule(&'a Rule),
    Drill(&'a Drill),
    Page(Page),
    Topic(&'a Topic),
    Explainer(&'a Explainer),
    Card(&'a Card),
    Claim(&'a Card, &'a Claim),
    Symptom(&'a Symptom),
}

impl Subject<'_> {
    /// The kind of the subject, in a word.
    fn kind(&self) -> &'static str {
        match self {
            Subject::Code(_) => "code",
            Subject::Rule(_) => "rule",
            Subject::Drill(_) => "drill",
            Subject::Page(_) => "page",
            Subject::Topic(_) => "topic",
            Subject::Explainer(_) => "explainer",
            Subject::Card(_) => "card",
            Subject::Claim(..) => "claim",
            Subject::Symptom(_) => "symptom",
        }
    }

    /// The names by which the subject is found, the usual one first.
    fn names(&self) -> Vec<String> {
        match self {
            Subject::Code(c) => vec![c.id.to_string()],
            Subject::Rule(r) => vec![r.id.clone()],
            Subject::Drill(d) => vec![d.id.clone()],
            Subject::Page(p) => vec![p.name().to_string(), p.title().to_string()],
            Subject::Topic(t) => vec![t.name.clone(), t.number.clone(), format!("topic {}", t.number)],
            Subject::Explainer(e) => vec![e.name.clone(), format!("explainer {}", e.number)],
            Subject::Card(c) => vec![c.name.clone(), c.title.clone()],
            Subject::Claim(_, c) => vec![c.id.clone()],
            Subject::Symptom(s) => s.words.iter().chain([&s.title]).cloned().collect(),
        }
    }

    /// One line about the subject.
    fn summary(&self) -> &str {
        match self {
            Subject::Code(c) => c.title,
            Subject::Rule(r) => r.text.split(" (").next().unwrap_or(&r.text),
            Subject::Drill(d) => &d.fault,
            Subject::Page(p) => p.title(),
            Subject::Topic(t) => &t.title,
            Subject::Explainer(e) => &e.title,
            Subject::Card(c) => &c.title,
            Subject::Claim(_, c) => &c.text,
            Subject::Symptom(s) => &s.title,
        }
    }
}

/// Returns the pages that have no other kind: those of the manual and the guides.
pub(super) fn named_pages() -> impl Iterator<Item = Page> {
    let is_named =
        |p: &Page| ["docs/manual/", "docs/guides/"].iter().any(|folder| p.path.starts_with(folder));
    all_pages().filter(move |p| is_named(p) && !p.path.ends_with("/README.md"))
}

/// Returns everything that can be explained.
fn all_subjects<'a>(library: &'a Library, registry: &Registry) -> Vec<Subject<'a>> {
    let codes = registry.iter().map(Subject::Code);
    let rules = library.rules.iter().map(Subject::Rule);
    let drills = library.drills.iter().map(Subject::Drill);
    let topics = library.topics.iter().map(Subject::Topic);
    let explainers = library.explainers.iter().map(Subject::Explainer);
    let cards = library.cards.iter().map(Subject::Card);
    let claims =
        library.cards.iter().flat_map(|card| card.claims.iter().map(move |c| Subject::Claim(card, c)));
    let symptoms = library.symptoms.iter().map(Subject::Symptom);
    codes
        .chain(rules)
        .chain(drills)
        .chain(named_pages().map(Subject::Page))
        .chain(topics)
        .chain(explainers)
        .chain(cards)
        .chain(claims)
        .chain(symptoms)
        .collect()
}

/// Returns the lower-case words of a text without [`FILLERS`]; hyphens separate words.
fn words_of(text: &str) -> Vec<String> {
    let words = text.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty());
    words.map(str::to_lowercase).filter(|w| !FILLERS.contains(&w.as_str())).collect()
}

/// Finds the subjects with the name in the question. Without one, finds those whose name consists of
/// words of the question, and returns those with the longest name.
///
/// # Errors
/// Returns T0032 with the nearest names of each kind if nothing is found.
pub(super) fn find_subjects<'a>(
    question: &str,
    library: &'a Library,
    registry: &Registry,
) -> Result<Vec<Subject<'a>>, Diagnostic> {
    let asked = words_of(question);
    let subjects = all_subjects(library, registry);
    let with_name = |is_meant: &dyn Fn(&[String]) -> bool| -> Vec<(usize, Subject<'a>)> {
        let length = |t: &Subject<'a>| {
            t.names()
                .iter()
                .map(|n| words_of(n))
                .filter(|n| !n.is_empty() && is_meant(n))
                .map(|n| n.len())
                .max()
        };
        subjects.iter().filter_map(|t| Some((length(t)?, *t))).collect()
    };
    let mut named = with_name(&|name| *name == asked);
    if named.is_empty() {
        named = with_name(&|name| name.iter().all(|w| asked.contains(w)));
        let longest = named.iter().map(|(length, _)| *length).max().unwrap_or_default();
        named.retain(|(length, _)| *length == longest);
    }
    named.truncate(MAX_ANSWERS);
    if named.is_empty() {
        return Err(unknown_question(question, &subjects));
    }
    Ok(named.into_iter().map(|(_, subject)| subject).collect())
}

/// Names the nearest subjects of each kind.
fn unknown_question(question: &str, subjects: &[Subject<'_>]) -> Diagnostic {
    let near_codes = nearest_codes(question, subjects);
    let text = match near_codes.is_empty() {
        true => format!("this build does not know `{question}`"),
        false => format!("no code `{question}` in this build"),
    };
    let mut d = Diagnostic::error(&T0032, text);
    for code in near_codes {
        d = d.with_label(code.id, code.title);
    }
    for kind in ["rule", "drill", "page", "topic", "explainer", "card", "symptom"] {
        if let Some((name, subject)) = nearest_subject(question, kind, subjects) {
            d = d.with_label(format!("{kind} `{name}`"), subject.summary());
        }
    }
    d.with_hint("`tessera explain` lists all codes, pages, subjects, explainers, cards and symptoms")
}

/// Returns the codes with the nearest numbers, if the question looks like a code.
fn nearest_codes(question: &str, subjects: &[Subject<'_>]) -> Vec<&'static Code> {
    let digits = |s: &str| {
        s.chars().filter_map(|c| c.to_digit(10)).fold(0i64, |n, d| (n * 10 + i64::from(d)) % 1_000_000)
    };
    let is_like_code = question.trim().len() >= 3
        && !question.trim().contains(char::is_whitespace)
        && question.chars().filter(char::is_ascii_digit).count() >= 3;
    if !is_like_code {
        return Vec::new();
    }
    let mut codes: Vec<&'static Code> = subjects
        .iter()
        .filter_map(|t| match t {
            Subject::Code(c) => Some(*c),
            _ => None,
        })
        .collect();
    codes.sort_by_key(|c| ((digits(c.id) - digits(question)).abs(), c.id));
    codes.truncate(MAX_CODES);
    codes
}

/// Returns the name of a kind that is spelled most like the question, or else the one that shares the
/// most words with it.
fn nearest_subject<'t, 'a>(
    question: &str,
    kind: &str,
    subjects: &'t [Subject<'a>],
) -> Option<(String, &'t Subject<'a>)> {
    let asked = words_of(question);
    let own = subjects.iter().filter(|s| s.kind() == kind);
    let mut named: Vec<(String, &Subject<'a>)> =
        own.flat_map(|s| s.names().into_iter().map(move |n| (n, s))).collect();
    let spelled: Vec<String> = named.iter().map(|(n, _)| words_of(n).join(" ")).collect();
    if let Some(nearest) = closest_name(&asked.join(" "), spelled.iter().map(String::as_str)) {
        let at = spelled.iter().position(|n| n == nearest)?;
        return Some(named.swap_remove(at));
    }
    let shared = |name: &str| words_of(name).iter().filter(|w| asked.contains(w)).count();
    let by_words = named.into_iter().map(|(n, s)| (shared(&n), n, s)).filter(|(count, ..)| *count > 0);
    // Of several names with as many words in common, the first one is the usual name.
    let best = by_words.reduce(|best, other| if other.0 > best.0 { other } else { best });
    best.map(|(_, name, subject)| (name, subject))
}
