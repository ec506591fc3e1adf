//! Tests of all checks of the library: a small project that passes, and one planted mistake per case.

mod cases;

use std::collections::BTreeMap;

use super::topics::{TOPIC_COUNT, TOPICS};
use super::*;
use cases::{CASES, Case};

/// The pages of the manual that are topics: name of the page, number and name of the topic.
const OPERATOR_TOPICS: [(&str, &str); 8] = [
    ("control-plane", "20 framing"),
    ("determinism", "04 determinism"),
    ("groups", "02 deadlock"),
    ("kv", "22 kv"),
    ("overlap", "19 overlap"),
    ("replay", "21 replay"),
    ("scheduling", "24 scheduling"),
    ("shutdown", "03 shutdown"),
];

/// Returns the files of a project in which every check of the library passes.
fn valid_files() -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    let mut put = |path: &str, text: String| files.insert(path.to_string(), text);
    put("filetests/a.tir", "// a\n".to_string());
    put(
        "docs/reference/drills.md",
        "| `a-drill` | T0701 | 1 | init parity | f | 3 s | [determinism](../manual/determinism.md) |\n"
            .to_string(),
    );
    for page in RULE_PAGES {
        let topic = OPERATOR_TOPICS.iter().find(|(name, _)| *name == page.name());
        let topic = topic.map(|(_, topic)| format!("<!-- topic: {topic} -->\n")).unwrap_or_default();
        let proof = if page.prefix == 'C' { "drill `a-drill`" } else { "filetest `a.tir`" };
        let reason = if page.prefix == 'G' {
            " NCCL. Why: [nccl-1](../library/cards/nccl-user-guide.md#nccl-1)."
        } else {
            ""
        };
        let details = if page.prefix == 'G' { "\n## Details\n\n### Topologies\n\nRule: G-01.\n" } else { "" };
        put(
            page.path,
            format!(
                "# P\n\n{topic}<!-- status: ready -->\n\n## Contract\n\nMust:\n\n- **{}-01** One ({proof}).{reason}\n{details}",
                page.prefix
            ),
        );
    }
    put_topics(&mut put);
    put_explainers(&mut put);
    put_cards(&mut put);
    put_tables(&mut put);
    files
}

fn put_topics(put: &mut impl FnMut(&str, String) -> Option<String>) {
    let has_page = |number: &str| {
        let of_page = |topic: &str, name: &str| {
            topic.starts_with(number) && RULE_PAGES.iter().any(|p| p.name() == name)
        };
        OPERATOR_TOPICS.iter().any(|(name, topic)| of_page(topic, name))
    };
    for number in (1..=TOPIC_COUNT).map(|n| format!("{n:02}")).filter(|n| !has_page(n)) {
        let rules = if number == "12" { "- **P-01** and **X-01**: one." } else { "- **C-01**: one." };
        put(
            &format!("{TOPICS}{number}-topic.md"),
            format!(
                "# T\n\n<!-- topic: {number} topic -->\n<!-- status: ready -->\n\n## What holds\n\n{}\n\n## Here\n\n\
See [a](../../../filetests/a.tir).\n\n## Rules\n\n{rules}\n\n## Sources\n\n\
- [nccl-1](../cards/nccl-user-guide.md#nccl-1): one\n",
                "word ".repeat(120)
            ),
        );
    }
}

fn put_explainers(put: &mut impl FnMut(&str, String) -> Option<String>) {
    let cards = cards::NAMES;
    for number in (1..=explainers::EXPLAINER_COUNT).map(|n| format!("{n:02}")) {
        // Every claim needs a user.
        let links: String =
            cards.iter().map(|c| format!("[{}]({}#{})\n", prefix(c), card_link(c), prefix(c))).collect();
        put(
            &format!("{}{number}-explainer.md", explainers::EXPLAINERS),
            format!(
                "# E\n\n<!-- explainer: {number} explainer -->\n<!-- status: ready -->\n<!-- topics: 05, 02 -->\n\
<!-- cards: gpipe -->\n\n## The question\n\nWhy?\n\n## The picture\n\n`tessera plan models/demo`\n\n## What must hold\n\n\
- D-01 holds.\n\nSo does C-01. And K-01 too.\n\n## Break it\n\n`tessera drill a-drill`\n\n## Read on\n\n\
[05](../topics/05-topic.md), [02](../../manual/groups.md), [gpipe](../cards/gpipe.md)\n{links}"
            ),
        );
    }
}

/// The id of the only claim of a card in this project.
fn prefix(card: &str) -> String {
    if card == "nccl-user-guide" { "nccl-1".to_string() } else { format!("{}-1", card.replace('-', "")) }
}

fn card_link(card: &str) -> String {
    format!("../cards/{card}.md")
}

fn put_cards(put: &mut impl FnMut(&str, String) -> Option<String>) {
    for name in cards::NAMES {
        let id = prefix(name);
        let head = format!(
            "# C\n\n<!-- card: {name} -->\n<!-- status: ready -->\n\n| | |\n| --- | --- |\n| source | [s](https://s) |\n\
| version | 1 |\n| read | 2026-11-26 |\n| licence | L |\n| full text | not kept: long |\n\n## Claims\n\n\
### {id}\n\nOne \"short quotation\" here.\n\nAt: section 1.\n\n"
        );
        put(
            &format!("{}{name}.md", references::CARDS),
            head + "## What it means here\n\nA.\n\n## What it does not say\n\nB.\n",
        );
    }
}

fn put_tables(put: &mut impl FnMut(&str, String) -> Option<String>) {
    let row = |n: usize| format!("| {n:02} explainer | 05, 02 | gpipe |\n");
    let rows: String = (1..=explainers::EXPLAINER_COUNT).map(row).collect();
    put(
        tables::README,
        format!(
            "# L\n\n<!-- tidy:retired -->\n<!-- /tidy:retired -->\n<!-- tidy:explainers -->\n| e | t | c |\n| --- | --- | --- |\n\
{rows}<!-- /tidy:explainers -->\n<!-- tidy:crosswalk -->\n| p | s | r |\n| --- | --- | --- |\n\
| `docs/reference/envelope.md` | Limits | C-01 |\n<!-- /tidy:crosswalk -->\n"
        ),
    );
    put("docs/reference/envelope.md", "## Limits\n".to_string());
    put("docs/guides/lockstep.md", "# L\n\n## One call\n\nRule: C-01.\n".to_string());
    put(
        "docs/library/units.md",
        "# U\n\n<!-- tidy:units -->\n<!-- /tidy:units -->\n<!-- tidy:log -->\n<!-- /tidy:log -->\n"
            .to_string(),
    );
    put(
        symptoms::PATH,
        "# S\n\n## A\n\n- Words: a\n- What: b\n- First: c\n- Pages: [topic](topics/05-topic.md)\n"
            .to_string(),
    );
    let questions: String =
        (1..=7).map(|n| format!("| Q{n}: a? | drill `a-drill` | [kv](kv.md) |\n")).collect();
    put(
        "docs/manual/README.md",
        format!("# M\n\n## Seven questions\n\n| q | a | p |\n| --- | --- | --- |\n{questions}"),
    );
    put("crates/tessera-library/Cargo.toml", String::new());
}

fn tree_of(files: &BTreeMap<String, String>) -> Tree {
    let files: Vec<(&str, &str)> = files.iter().map(|(p, t)| (p.as_str(), t.as_str())).collect();
    Tree::from_files(&files)
}

/// Returns the problems of a project whose generated files are up to date.
fn problems(files: &BTreeMap<String, String>) -> Vec<String> {
    let mut files = files.clone();
    // Twice, because a generated page is listed in a generated file.
    for _ in 0..2 {
        for (path, text) in generated_files(&tree_of(&files)) {
            files.insert(path.to_string(), text);
        }
    }
    let tree = tree_of(&files);
    let mut found = Vec::new();
    check(&tree, &mut found);
    super::super::text::check_page_links(&tree, &mut found);
    found.sort();
    found.iter().map(Problem::to_string).collect()
}

/// Plants the mistake of a case.
fn plant(case: &Case) -> BTreeMap<String, String> {
    let mut files = valid_files();
    let text = files.remove(case.path).unwrap_or_else(|| panic!("no file {}", case.path));
    if case.from.is_empty() {
        return files;
    }
    assert!(text.contains(case.from), "{} does not contain {:?}", case.path, case.from);
    files.insert(case.path.to_string(), text.replacen(case.from, case.to, 1));
    files
}

#[test]
fn a_project_without_mistakes_passes() {
    assert_eq!(problems(&valid_files()), Vec::<String>::new());
}

#[test]
fn every_planted_mistake_is_reported() {
    let mut wrong = Vec::new();
    for case in CASES {
        let found = problems(&plant(case));
        if !found.iter().any(|p| p.contains(case.message)) {
            wrong.push(format!(
                "{} in {}: expected {:?}\n{}",
                case.check,
                case.path,
                case.message,
                found.join("\n")
            ));
        }
    }
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), CASES.len(), wrong.join("\n\n"));
}

#[test]
fn a_card_is_short() {
    let mut files = valid_files();
    let card = files.get_mut("docs/library/cards/gpipe.md").unwrap();
    *card += &"long\n".repeat(1300);
    let found = problems(&files);
    assert!(found.len() == 1 && found[0].contains("6144 are allowed"), "{found:?}");
}

#[test]
fn generated_files_are_compared_byte_by_byte() {
    let mut files = valid_files();
    let names = [backmap::PATH, crosswalk::PATH, crate::tree::LIBRARY_DATA, embedded::PATH];
    files.extend(names.map(|path| (path.to_string(), "old\n".to_string())));
    let mut found = Vec::new();
    check(&tree_of(&files), &mut found);
    let paths: Vec<&str> = found.iter().map(|p| p.path.as_str()).collect();
    assert_eq!(paths, names);
}

#[test]
fn rule_ids_are_whole_words_of_a_known_page() {
    let text = "see D-03, X-29; not A-01, D-3, D-034, AD-03 or TD-03-1.";
    assert_eq!(rule_ids(text).collect::<Vec<_>>(), ["D-03", "X-29"]);
}
