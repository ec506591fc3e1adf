//! The rules, drills, symptoms, topics, explainers and cards, as `cargo xtask library` writes them from
//! the pages.

use serde::Deserialize;

use crate::page::strip_markup;

const DATA: &str = include_str!("../../../docs/library/library.json");

/// Everything that the library connects.
#[derive(Debug, Deserialize)]
pub struct Library {
    /// Rules, ordered by page and id.
    pub rules: Vec<Rule>,
    /// Drills, in the order of the reference page.
    pub drills: Vec<Drill>,
    codes: Vec<CodePage>,
    /// Problems as a person sees them.
    pub symptoms: Vec<Symptom>,
    /// Topics 01 to 24, ordered by number.
    pub topics: Vec<Topic>,
    /// Explainers, ordered by number.
    pub explainers: Vec<Explainer>,
    /// Cards of outside sources, ordered by name.
    pub cards: Vec<Card>,
}

/// A rule of a page.
#[derive(Debug, Deserialize)]
pub struct Rule {
    /// Id such as `D-03`.
    pub id: String,
    /// Name of the page that states the rule, such as `determinism`.
    pub page: String,
    /// Whether the rule names something that must not happen.
    pub forbidden: bool,
    /// The sentence, with the names of its proof.
    pub text: String,
    /// Codes with which a violation ends.
    pub codes: Vec<String>,
    /// Drills that break the rule on purpose.
    pub drills: Vec<String>,
    /// Claims of cards that give the reason, such as `nccl-3`.
    pub claims: Vec<String>,
    /// Numbers of the topics that the rule belongs to.
    pub topics: Vec<String>,
    /// Numbers of the explainers that name the rule.
    pub explainers: Vec<String>,
}

/// A drill with its expected failure.
#[derive(Debug, Deserialize)]
pub struct Drill {
    /// Name such as `stopped-rank`.
    pub id: String,
    /// The code with which the drill ends; `None` for a measurement.
    pub code: Option<String>,
    /// `rank 1`, or `no rank`.
    pub rank: String,
    /// The place of the check, such as `leader preflight`.
    pub place: String,
    /// The injected fault in a few words.
    pub fault: String,
    /// Name of the manual page.
    pub page: String,
    /// Ids of the rules that the drill shows.
    pub rules: Vec<String>,
}

/// The page on which a code stands.
#[derive(Debug, Deserialize)]
struct CodePage {
    id: String,
    page: Option<String>,
}

/// A problem as a person sees it.
#[derive(Debug, Deserialize)]
pub struct Symptom {
    /// Heading of the symptom.
    pub title: String,
    /// Lower-case words and phrases that find it.
    pub words: Vec<String>,
    /// What the symptom means.
    pub what: String,
    /// What to look at first.
    pub first: String,
    /// Codes with which it may end.
    pub codes: Vec<String>,
    /// Drills that show it.
    pub drills: Vec<String>,
    /// Names of the pages that say more.
    pub pages: Vec<String>,
}

/// A topic: what holds in general, and how it is here.
#[derive(Debug, Deserialize)]
pub struct Topic {
    /// Number of two digits, such as `05`.
    pub number: String,
    /// Name such as `cuda-streams`.
    pub name: String,
    /// Heading of the page.
    pub title: String,
    /// Path of the page in the repository.
    pub page: String,
    /// Ids of the rules of the topic.
    pub rules: Vec<String>,
    /// Claims of cards that the topic cites.
    pub claims: Vec<String>,
}

/// An explainer: one question of someone who never ran two GPUs.
#[derive(Debug, Deserialize)]
pub struct Explainer {
    /// Number of two digits, such as `06`.
    pub number: String,
    /// Name such as `failure-modes`.
    pub name: String,
    /// Heading of the page.
    pub title: String,
    /// Path of the page in the repository.
    pub page: String,
    /// Numbers of the topics to read on.
    pub topics: Vec<String>,
    /// Names of the cards to read on.
    pub cards: Vec<String>,
    /// Ids of the rules that must hold.
    pub rules: Vec<String>,
    /// Drills to try.
    pub drills: Vec<String>,
}

/// A card: what an outside source claims.
#[derive(Debug, Deserialize)]
pub struct Card {
    /// Name such as `nccl-user-guide`.
    pub name: String,
    /// Heading of the page.
    pub title: String,
    /// Path of the page in the repository.
    pub page: String,
    /// Address of the source.
    pub source: String,
    /// Version, commit or date of the source.
    pub version: String,
    /// Date on which the source was read.
    pub read: String,
    /// The claims, in the order of the page.
    pub claims: Vec<Claim>,
}

/// A claim of a card.
#[derive(Debug, Deserialize)]
pub struct Claim {
    /// Id such as `nccl-3`.
    pub id: String,
    /// The claim in the project's own words.
    pub text: String,
    /// The place in the source.
    pub at: String,
    /// Whether that place was read again; if not, no rule rests on the claim.
    pub read_again: bool,
    /// The rules, topics and explainers that cite it.
    pub users: Vec<User>,
}

/// A page or rule that cites a claim.
#[derive(Debug, Deserialize)]
pub struct User {
    /// `rule`, `topic` or `explainer`.
    pub kind: String,
    /// Rule id, or number of the topic or explainer.
    pub id: String,
}

impl Library {
    /// Reads the data of this build.
    ///
    /// # Errors
    /// Returns the place at which the embedded file is not what `cargo xtask library` writes, which a test
    /// of this crate excludes.
    pub fn read() -> Result<Library, String> {
        let mut library: Library =
            serde_json::from_str(DATA).map_err(|e| format!("docs/library/library.json: {e}"))?;
        let rules = library.rules.iter_mut().map(|r| &mut r.text);
        let symptoms = library.symptoms.iter_mut().flat_map(|s| [&mut s.what, &mut s.first]);
        let claims = library.cards.iter_mut().flat_map(|c| &mut c.claims).map(|c| &mut c.text);
        let texts = rules.chain(symptoms).chain(claims);
        texts.for_each(|text| *text = strip_markup(text));
        Ok(library)
    }

    /// Iterates over the drills that end with a code.
    pub fn drills_of_code<'a>(&'a self, code: &'a str) -> impl Iterator<Item = &'a Drill> {
        self.drills.iter().filter(move |d| d.code.as_deref() == Some(code))
    }

    /// Iterates over the rules that name a code or a drill that ends with it, in the order of their ids.
    pub fn rules_of_code<'a>(&'a self, code: &'a str) -> impl Iterator<Item = &'a Rule> {
        let ends_with = |drill: &String| self.drills_of_code(code).any(|d| d.id == *drill);
        self.rules.iter().filter(move |r| r.codes.iter().any(|c| c == code) || r.drills.iter().any(ends_with))
    }

    /// Returns the name of the page on which a code stands.
    #[must_use]
    pub fn page_of_code(&self, code: &str) -> Option<&str> {
        self.codes.iter().find(|c| c.id == code)?.page.as_deref()
    }

    /// Returns the rule with this id.
    #[must_use]
    pub fn find_rule(&self, id: &str) -> Option<&Rule> {
        self.rules.iter().find(|r| r.id == id)
    }

    /// Returns the drill with this name.
    #[must_use]
    pub fn find_drill(&self, id: &str) -> Option<&Drill> {
        self.drills.iter().find(|d| d.id == id)
    }

    /// Returns a claim and its card.
    #[must_use]
    pub fn find_claim(&self, id: &str) -> Option<(&Card, &Claim)> {
        self.cards.iter().find_map(|card| Some((card, card.claims.iter().find(|c| c.id == id)?)))
    }

    /// Returns the explainers that name some rules, the one with most of them first.
    #[must_use]
    pub fn explainers_of_rules(&self, rules: &[&str]) -> Vec<&Explainer> {
        sort_by_shared(&self.explainers, |e| &e.rules, rules)
    }

    /// Returns the topics that hold some rules, the one with most of them first.
    #[must_use]
    pub fn topics_of_rules(&self, rules: &[&str]) -> Vec<&Topic> {
        sort_by_shared(&self.topics, |t| &t.rules, rules)
    }
}

/// Maximum number of explainers or topics to read on.
const MAX_READING: usize = 4;

/// Returns the items that share a rule with some rules, the one that shares most first.
fn sort_by_shared<'a, T>(
    items: &'a [T],
    rules_of: impl Fn(&T) -> &Vec<String>,
    rules: &[&str],
) -> Vec<&'a T> {
    let shared = |item: &T| rules_of(item).iter().filter(|r| rules.contains(&r.as_str())).count();
    let mut found: Vec<(usize, &T)> = items.iter().map(|item| (shared(item), item)).collect();
    found.retain(|(count, _)| *count > 0);
    found.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
    found.into_iter().take(MAX_READING).map(|(_, item)| item).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::Page;

    #[test]
    fn every_page_that_the_data_name_is_embedded() {
        let library = Library::read().unwrap();
        let is_embedded = |name: &String| Page::from_name(name).is_some();
        assert!(library.rules.iter().map(|r| &r.page).all(is_embedded));
        assert!(library.drills.iter().map(|d| &d.page).all(is_embedded));
        assert!(library.symptoms.iter().flat_map(|s| &s.pages).all(is_embedded));
        assert!(library.codes.iter().filter_map(|c| c.page.as_ref()).all(is_embedded));
    }
}
