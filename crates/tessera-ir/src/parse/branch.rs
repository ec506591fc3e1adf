//! Branches and loops, which programs do not have: words for them are met with the reason, and what they enclose
//! is passed over.

use super::Parser;
use super::lex::Tok;
use super::resolve::Names;

/// What to do instead of branching.
pub(super) const NO_BRANCHES: &str = "programs have no branches, so that every rank issues the same collectives: leave \
the decision to the leader (a call's list of phases, or another phase), and always call the collective, with an empty \
payload if need be";

/// Words that other languages branch, loop or choose with, as ops or as keys of an operand.
const WORDS: &[&str] = &[
    "branch",
    "case",
    "cond",
    "condition",
    "elif",
    "else",
    "for",
    "if",
    "loop",
    "pred",
    "predicate",
    "select",
    "switch",
    "unless",
    "when",
    "where",
    "while",
];

/// Whether a word, with or without a dialect, would make what runs depend on data.
pub(super) fn is_branch(spelled: &str) -> bool {
    let bare = spelled.rsplit('.').next().unwrap_or(spelled);
    WORDS.contains(&bare)
}

impl Parser<'_> {
    /// After a refused statement that began at token `begin`: if it opens a branch, on to its end. Values defined
    /// inside become known as refused, so that their uses are not reported as well.
    pub(super) fn skip_branch(&mut self, begin: usize, names: &mut Names) -> bool {
        let word = |at: usize| {
            self.tokens.get(at).and_then(|t| match &t.tok {
                Tok::Word(w) => Some(w.as_str()),
                _ => None,
            })
        };
        let first = (begin..self.at.max(begin + 1)).find_map(word);
        if !first.is_some_and(is_branch) {
            return false;
        }
        let mut at = begin;
        loop {
            let head = at;
            let opens = |at: usize| self.tokens.get(at).is_some_and(|t| t.tok == Tok::Punct('{'));
            let goes_on = |at: usize| self.tokens.get(at).is_some_and(|t| at == head || !t.first);
            while goes_on(at) && !opens(at) {
                at += 1;
            }
            if !opens(at) && head == begin {
                return false;
            }
            if !opens(at) {
                at = head;
                break;
            }
            let mut open = 0usize;
            while let Some(t) = self.tokens.get(at) {
                match &t.tok {
                    Tok::Punct('{') => open += 1,
                    Tok::Punct('}') => open -= 1,
                    Tok::Value(n) if self.tokens.get(at + 1).is_some_and(|t| t.tok == Tok::Punct('=')) => {
                        names.entry(n.clone()).or_insert((None, t.span));
                    }
                    _ => {}
                }
                at += 1;
                if open == 0 {
                    break;
                }
            }
            if !self
                .tokens
                .get(at)
                .is_some_and(|t| matches!(&t.tok, Tok::Word(w) if w == "else" || w == "elif"))
            {
                break;
            }
        }
        self.at = at;
        self.recover(at);
        true
    }
}
