//! The collectives that a block issues, in order, as far as the file shows.

use std::cell::RefCell;
use std::collections::BTreeMap;

use tessera_base::Span;

use super::module::Module;
use super::syntax::{Expr, ExprKind, Stmt, StmtKind};

/// Collectives of a sequence that are compared. Functions that call each other twice would double them at each
/// level.
pub const SEQUENCE_LIMIT: usize = 64;

/// A collective that a statement issues, itself or in a function of this file.
#[derive(Debug, Clone)]
pub struct Issued {
    /// What must be equal on all members: the name of the collective and its group.
    pub signature: String,
    /// The collective's name.
    pub name: String,
    /// The text of the group, if the call names one.
    pub group: Option<String>,
    /// The call that issues it, in the function that is looked at.
    pub span: Span,
    /// The function of this file that issues it, if the call does not do so itself.
    pub through: Option<String>,
}

/// Collects sequences; those of called functions are kept.
#[derive(Debug)]
pub struct Sequences<'a> {
    module: &'a Module<'a>,
    of_functions: RefCell<BTreeMap<usize, Vec<Issued>>>,
}

impl<'a> Sequences<'a> {
    /// Creates the collector for a file.
    #[must_use]
    pub fn new(module: &'a Module<'a>) -> Sequences<'a> {
        Sequences { module, of_functions: RefCell::default() }
    }

    /// Returns the collectives of a block. Arms that issue the same count once.
    #[must_use]
    pub fn of_block(&self, block: &[Stmt], scope: usize) -> Vec<Issued> {
        block.iter().flat_map(|s| self.of_statement(s, scope)).take(SEQUENCE_LIMIT).collect()
    }

    /// Returns the collectives of one statement with its blocks.
    #[must_use]
    pub fn of_statement(&self, statement: &Stmt, scope: usize) -> Vec<Issued> {
        let mut out: Vec<Issued> =
            statement.list_expressions().into_iter().flat_map(|e| self.of_expression(e, scope)).collect();
        let mut blocks = statement.list_blocks().into_iter().map(|b| self.of_block(b, scope));
        if matches!(statement.kind, StmtKind::If(..) | StmtKind::Match(..)) {
            let first = blocks.next().unwrap_or_default();
            let others: Vec<Vec<Issued>> = blocks.collect();
            let same = others.iter().all(|o| signatures(o) == signatures(&first));
            out.extend(first);
            out.extend(others.into_iter().flatten().filter(|_| !same));
        } else {
            out.extend(blocks.flatten());
        }
        out.truncate(SEQUENCE_LIMIT);
        out
    }

    /// Returns the collectives that an expression issues.
    #[must_use]
    pub fn of_expression(&self, expr: &Expr, scope: usize) -> Vec<Issued> {
        let mut out = Vec::new();
        expr.visit(&mut |e| {
            let Some(call) = e.as_call() else { return };
            if let Some(collective) = self.module.names.find_collective(e) {
                let group = collective.find_group(call).map(group_text);
                let signature = format!("{} {}", collective.name, group.as_deref().unwrap_or_default());
                out.push(Issued { signature, name: collective.name, group, span: e.span, through: None });
            } else if let Some(path) = call.function.to_dotted()
                && let Some(function) = self.module.find_function(&path, scope)
            {
                let inner = self.of_function(function).into_iter();
                out.extend(inner.map(|i| Issued { span: e.span, through: Some(path.clone()), ..i }));
            }
        });
        out.truncate(SEQUENCE_LIMIT);
        out
    }

    fn of_function(&self, function: usize) -> Vec<Issued> {
        if let Some(known) = self.of_functions.borrow().get(&function) {
            return known.clone();
        }
        // A function that calls itself issues nothing that its other statements do not show.
        self.of_functions.borrow_mut().insert(function, Vec::new());
        let found = self.of_block(self.module.scopes[function].body, function);
        self.of_functions.borrow_mut().insert(function, found.clone());
        found
    }
}

/// Returns what must be equal, in order.
#[must_use]
pub fn signatures(sequence: &[Issued]) -> Vec<&str> {
    sequence.iter().map(|i| i.signature.as_str()).collect()
}

/// A text by which two groups can be compared.
fn group_text(group: &Expr) -> String {
    match &group.kind {
        ExprKind::Constant(text) => text.clone(),
        ExprKind::Call(call) => format!("{}()", call.function.to_dotted().unwrap_or_default()),
        _ => group.to_dotted().unwrap_or_else(|| format!("group at {}", group.span.start)),
    }
}
