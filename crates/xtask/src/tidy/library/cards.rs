//! Reads the cards of outside sources with their claims, and checks their form.

use super::super::Problem;
use super::super::markdown::{Section, read_comment, read_title, split_sections};
use super::references::{CARDS, is_claim_id};
use super::tables::{is_date, read_status};
use crate::tree::{File, Tree};

/// The cards that exist, so that none can vanish.
pub(super) const NAMES: [&str; 14] = [
    "nccl-user-guide",
    "pytorch-cuda-semantics",
    "funcol-rfc-93173",
    "dynamo-deep-dive",
    "ezyang-state-of-compile",
    "gpipe",
    "pipedream-2bw",
    "streamdiffusionv2",
    "making-dl-go-brrrr",
    "pagedattention",
    "pytorch-pipelining-api",
    "zero-bubble-pp",
    "pytorch-distributed-api",
    "cuda-async-execution",
];
/// The rows of a card's table.
const FIELDS: [&str; 5] = ["source", "version", "read", "licence", "full text"];
/// Maximum size of a card: it says what a source claims and does not replace the source.
const MAX_BYTES: usize = 6 * 1024;
/// Maximum number of characters of a claim.
const MAX_CLAIM_CHARS: usize = 200;
/// Maximum number of words of a quotation within a claim.
const MAX_QUOTED_WORDS: usize = 12;
/// The beginning of the place of a claim that nobody could read again.
const NOT_READ: &str = "not read again";

/// A card.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Card {
    /// File stem, such as `nccl-user-guide`.
    pub(super) name: String,
    pub(super) title: String,
    pub(super) path: String,
    pub(super) status: String,
    /// The table above the first section: lower-case name and text of each row.
    fields: Vec<(String, String)>,
    pub(super) claims: Vec<Claim>,
}

/// A statement of a source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Claim {
    /// Id such as `nccl-3`.
    pub(super) id: String,
    pub(super) line: usize,
    pub(super) text: String,
    /// The place in the source; empty if the card does not name it.
    pub(super) at: String,
}

impl Card {
    /// Returns a row of the table; empty if it is missing.
    pub(super) fn field(&self, name: &str) -> &str {
        self.fields.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value)
    }

    /// Returns the address of the source, or its name if the row has no link.
    pub(super) fn source(&self) -> &str {
        let source = self.field("source");
        let target = source.split_once("](").and_then(|(_, rest)| rest.split_once(')'));
        target.map_or(source.trim_matches(['<', '>']), |(target, _)| target)
    }
}

impl Claim {
    /// Whether somebody read the place in the source again. Otherwise no rule rests on the claim.
    pub(super) fn is_read_again(&self) -> bool {
        !self.at.starts_with(NOT_READ)
    }
}

/// Reads all cards, ordered by name.
pub(super) fn read_cards(tree: &Tree, found: &mut Vec<Problem>) -> Vec<Card> {
    let files = tree.files.iter().filter(|f| f.path.starts_with(CARDS) && f.path.ends_with(".md"));
    files.map(|file| read_card(file, found)).collect()
}

fn read_card(file: &File, found: &mut Vec<Problem>) -> Card {
    let name = file.path[CARDS.len()..].trim_end_matches(".md").to_string();
    let (line, stated) = read_comment(&file.text, "card").unwrap_or((1, ""));
    if stated != name {
        let message = format!("state the name of the file below the title: <!-- card: {name} -->");
        found.push(Problem::new(&file.path, line, message));
    }
    let head = file.text.lines().take_while(|line| !line.starts_with("## "));
    let fields = head.filter_map(|line| {
        let (key, value) = line.strip_prefix('|')?.trim_end().strip_suffix('|')?.split_once('|')?;
        Some((key.trim().trim_matches('*').to_lowercase(), value.trim().to_string()))
    });
    let sections = split_sections(&file.text, 2);
    let claims = sections.iter().find(|s| s.name == "Claims").map(read_claims).unwrap_or_default();
    Card {
        title: read_title(&file.text).to_string(),
        status: read_status(&file.path, &file.text, found),
        path: file.path.clone(),
        fields: fields.collect(),
        name,
        claims,
    }
}

/// Reads the claims of a section: a heading with the id, a statement, and `At: ` with the place.
fn read_claims(section: &Section<'_>) -> Vec<Claim> {
    let text = section.text();
    let claims = split_sections(&text, 3).into_iter().map(|claim| {
        let place = claim.lines.iter().position(|l| l.starts_with("At:")).unwrap_or(claim.lines.len());
        let (text, at) = claim.lines.split_at(place);
        let join_lines = |lines: &[&str]| lines.join(" ").split_whitespace().collect::<Vec<_>>().join(" ");
        let at = join_lines(at).trim_start_matches("At:").trim_start().to_string();
        Claim { id: claim.name.to_string(), line: section.line + claim.line, text: join_lines(text), at }
    });
    claims.collect()
}

/// Checks that the cards exist, that their tables are complete, and the form of their claims.
pub(super) fn check(cards: &[Card], tree: &Tree, found: &mut Vec<Problem>) {
    for name in NAMES.iter().filter(|name| !cards.iter().any(|c| c.name == **name)) {
        found.push(Problem::new(&format!("{CARDS}{name}.md"), 0, "restore this card"));
    }
    for (i, card) in cards.iter().enumerate() {
        check_table(card, found);
        let size = tree.file_text(&card.path).map_or(0, str::len);
        if size > MAX_BYTES {
            let message =
                format!("the card has {size} bytes, {MAX_BYTES} are allowed: keep what this project uses");
            found.push(Problem::new(&card.path, 0, message));
        }
        check_claims(card, found);
        let prefix = find_prefix(card);
        if let Some(other) = cards[..i].iter().find(|c| prefix.is_some() && find_prefix(c) == prefix) {
            let message =
                format!("the claims begin with the same word as those of {}: rename them", other.path);
            found.push(Problem::new(&card.path, 0, message));
        }
    }
}

/// Checks that each row of the table exists and says something, and that the date is one.
fn check_table(card: &Card, found: &mut Vec<Problem>) {
    for field in FIELDS.iter().filter(|f| card.field(f).is_empty()) {
        found.push(Problem::new(&card.path, 1, format!("the table lacks `{field}`: add a row")));
    }
    let read = card.field("read");
    if !read.is_empty() && !is_date(read) {
        let message = format!("`{read}` is no date: write the day of reading as 2026-01-31");
        found.push(Problem::new(&card.path, 1, message));
    }
}

/// Checks ids, lengths, places and quotations of the claims of one card.
fn check_claims(card: &Card, found: &mut Vec<Problem>) {
    if card.claims.is_empty() && card.status == "ready" {
        found.push(Problem::new(&card.path, 0, "the card has no claim: add one, or set the status to stub"));
    }
    let prefix = find_prefix(card).unwrap_or_default();
    for (claim, number) in card.claims.iter().zip(1..) {
        let Claim { id, line, text, at } = claim;
        let mut report = |message: String| found.push(Problem::new(&card.path, *line, message));
        let expected = format!("{prefix}-{number}");
        if *id != expected || !is_claim_id(id) {
            report(format!("`{id}` is not the next id of this card: write {expected}"));
        }
        let length = text.chars().count();
        if length == 0 || length > MAX_CLAIM_CHARS {
            report(format!("{id} has {length} characters: write 1 to {MAX_CLAIM_CHARS}"));
        }
        if at.is_empty() {
            report(format!("{id} has no place: write `At: ` with the place in the source"));
        }
        for quotation in find_quotations(text) {
            let words = quotation.split_whitespace().count();
            if words > MAX_QUOTED_WORDS {
                report(format!(
                    "{id} quotes {words} words, {MAX_QUOTED_WORDS} are allowed: write it in own words"
                ));
            }
        }
    }
}

/// Returns the word before the number in the ids of a card.
fn find_prefix(card: &Card) -> Option<&str> {
    Some(card.claims.first()?.id.rsplit_once('-')?.0)
}

/// Returns the parts of a text between double quotes.
fn find_quotations(text: &str) -> Vec<String> {
    let plain = text.replace(['“', '”'], "\"");
    plain.split('"').skip(1).step_by(2).map(str::to_string).collect()
}
