//! Detection of branches and loops, which the IR does not have: the parser explains why and skips
//! the enclosed ops.

use super::lexer::TokenKind;
use super::{NameTable, Parser};

/// Hint that explains the alternative to a branch.
pub(super) const NO_BRANCHES: &str = "programs have no branches, so that every rank issues the same collectives: let \
the leader decide (through the phase list of a call, or another phase), and issue the collective unconditionally, with an empty \
payload if necessary";

/// Keywords for branches, loops and selection in other languages, used as op names or operand keys.
const BRANCH_KEYWORDS: &[&str] = &[
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

/// Returns whether a word, with or without a dialect prefix, would make execution depend on data.
pub(super) fn is_branch(spelled: &str) -> bool {
    let bare = spelled.rsplit('.').next().unwrap_or(spelled);
    BRANCH_KEYWORDS.contains(&bare)
}

impl Parser<'_> {
    /// Skips a branch with its `else` parts, if the rejected statement that began at token `begin`
    /// opens one. The values defined inside are recorded as rejected, so that their uses are not
    /// reported as well.
    pub(super) fn skip_branch(&mut self, begin: usize, names: &mut NameTable) -> bool {
        let word = |at: usize| {
            self.tokens.get(at).and_then(|t| match &t.kind {
                TokenKind::Word(w) => Some(w.as_str()),
                _ => None,
            })
        };
        let first = (begin..self.position.max(begin + 1)).find_map(word);
        if !first.is_some_and(is_branch) {
            return false;
        }
        let mut at = begin;
        loop {
            let head = at;
            let opens = |at: usize| self.tokens.get(at).is_some_and(|t| t.kind == TokenKind::Punct('{'));
            let goes_on = |at: usize| self.tokens.get(at).is_some_and(|t| at == head || !t.starts_line);
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
                match &t.kind {
                    TokenKind::Punct('{') => open += 1,
                    TokenKind::Punct('}') => open -= 1,
                    TokenKind::Value(n)
                        if self.tokens.get(at + 1).is_some_and(|t| t.kind == TokenKind::Punct('=')) =>
                    {
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
                .is_some_and(|t| matches!(&t.kind, TokenKind::Word(w) if w == "else" || w == "elif"))
            {
                break;
            }
        }
        self.position = at;
        self.skip_to_statement(at);
        true
    }
}
