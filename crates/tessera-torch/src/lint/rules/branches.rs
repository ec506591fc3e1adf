//! Collectives under conditions that may differ between ranks: T1435 to T1438 and T1444.

use std::collections::BTreeSet;

use tessera_base::{Code, Diagnostic, Severity};

use super::Finder;
use crate::codes::{T1435, T1436, T1437, T1438, T1444};
use crate::lint::causes::{Cause, Causes, evaluate_for_rank, list_agreed};
use crate::lint::sequences::{Issued, SEQUENCE_LIMIT, Sequences, signatures};
use crate::lint::syntax::{Expr, ExprKind, Handler, Stmt, StmtKind};

/// Ranks for which a condition on the rank is evaluated to see whether two conditions exclude each
/// other.
const SAMPLE_RANKS: std::ops::Range<i64> = 0..4;

/// Arms of an `if`, and conditions before a part of `and`, that are compared with one of them.
const NEIGHBOUR_LIMIT: usize = 16;

/// How a block ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Exit {
    /// With the statement after it.
    Falls,
    /// It leaves the loop's body.
    Continues,
    /// It leaves the loop.
    Breaks,
    /// It leaves the function.
    Returns,
    /// It ends the function or the process by an error.
    Raises,
}

/// What a rank issues after a block, by the way in which it leaves the block.
#[derive(Debug, Clone, Default)]
struct After {
    /// Until the end of this iteration, or of the function outside of loops.
    rest: Vec<Issued>,
    /// From the next iteration on.
    next: Vec<Issued>,
    /// After the loop.
    after_loop: Vec<Issued>,
}

impl After {
    fn follow_exit(&self, exit: Exit) -> Vec<Issued> {
        match exit {
            Exit::Falls => [self.rest.clone(), self.next.clone()].concat(),
            Exit::Continues => self.next.clone(),
            Exit::Breaks => self.after_loop.clone(),
            Exit::Returns | Exit::Raises => Vec::new(),
        }
    }
}

/// Looks for conditional collectives in each scope.
pub(in crate::lint) fn find_conditional_collectives(finder: &mut Finder<'_>) {
    let module = finder.module;
    let sequences = Sequences::new(module);
    let agreed = list_agreed(module);
    for scope in 0..module.scopes.len() {
        let causes = Causes::new(module, &agreed, scope);
        let mut walk = Walk { finder: &mut *finder, sequences: &sequences, causes, scope };
        walk.visit_block(module.scopes[scope].body, &After::default());
    }
}

struct Walk<'w, 'a> {
    finder: &'w mut Finder<'a>,
    sequences: &'w Sequences<'a>,
    causes: Causes<'w>,
    scope: usize,
}

impl Walk<'_, '_> {
    fn visit_block(&mut self, block: &[Stmt], after: &After) {
        let issued: Vec<Vec<Issued>> =
            block.iter().map(|s| self.sequences.of_statement(s, self.scope)).collect();
        let issuing: Vec<usize> = (0..block.len()).filter(|i| !issued[*i].is_empty()).collect();
        let paired = complementary_pairs(block, &issued);
        for (i, statement) in block.iter().enumerate() {
            for e in statement.list_expressions() {
                self.visit_expression(e);
            }
            let later = &issuing[issuing.partition_point(|j| *j <= i)..];
            let rest = later.iter().flat_map(|j| &issued[*j]).chain(&after.rest);
            let rest = rest.take(SEQUENCE_LIMIT).cloned().collect();
            let here = After { rest, ..after.clone() };
            match &statement.kind {
                StmtKind::If(arms, otherwise) => {
                    if !paired.contains(&i) {
                        self.check_if(arms, otherwise, &here);
                    }
                    for inner in statement.list_blocks() {
                        self.visit_block(inner, &here);
                    }
                }
                StmtKind::For(_, header, body, otherwise) | StmtKind::While(header, body, otherwise) => {
                    let is_for = matches!(statement.kind, StmtKind::For(..));
                    let own = self.sequences.of_block(body, self.scope);
                    self.check_loop(header, is_for, &own);
                    let after_loop = here.follow_exit(Exit::Falls);
                    let next = [own, after_loop.clone()].concat();
                    let inside = After { rest: Vec::new(), next, after_loop };
                    self.visit_block(body, &inside);
                    self.visit_block(otherwise, &here);
                }
                StmtKind::Try(body, handlers, rest) => {
                    self.check_try(body, handlers, &here);
                    for inner in [body, rest] {
                        self.visit_block(inner, &here);
                    }
                    for handler in handlers {
                        self.visit_block(&handler.body, &here);
                    }
                }
                _ => {
                    if let StmtKind::Match(subject, cases) = &statement.kind {
                        let cases: Vec<Vec<Issued>> =
                            cases.iter().map(|c| self.sequences.of_block(c, self.scope)).collect();
                        let _ = cases.windows(2).any(|c| self.report_difference(subject, &c[0], &c[1]));
                    }
                    for inner in statement.list_blocks() {
                        self.visit_block(inner, &here);
                    }
                }
            }
        }
    }

    /// Reports collectives behind `and`, `or` and in `a if c else b`.
    fn visit_expression(&mut self, expr: &Expr) {
        match &expr.kind {
            ExprKind::Boolean(parts) => {
                for (i, part) in parts.iter().enumerate().skip(1) {
                    let issued = self.sequences.of_expression(part, self.scope);
                    for condition in parts[..i].iter().take(NEIGHBOUR_LIMIT).filter(|_| !issued.is_empty()) {
                        self.report_difference(condition, &issued, &[]);
                    }
                }
            }
            ExprKind::Choice(parts) => {
                let [condition, then, otherwise] = &**parts;
                let then = self.sequences.of_expression(then, self.scope);
                let otherwise = self.sequences.of_expression(otherwise, self.scope);
                self.report_difference(condition, &then, &otherwise);
            }
            _ => {}
        }
        for part in expr.list_parts() {
            self.visit_expression(part);
        }
    }

    /// Compares what follows each arm of an `if`.
    fn check_if(&mut self, arms: &[(Expr, Vec<Stmt>)], otherwise: &[Stmt], after: &After) {
        let blocks = arms.iter().map(|(_, b)| b.as_slice()).chain([otherwise]);
        let ways: Vec<(&[Stmt], Vec<Issued>, Exit)> =
            blocks.map(|b| (b, self.sequences.of_block(b, self.scope), exit_of(b))).collect();
        for (i, (condition, _)) in arms.iter().enumerate() {
            let (body, own, exit) = &ways[i];
            let exit = *exit;
            // The other way: the next arms, of which the last has no condition.
            let last = ways[i + 1..].last().filter(|_| ways.len() - i > NEIGHBOUR_LIMIT);
            for (other, theirs, their_exit) in ways[i + 1..].iter().take(NEIGHBOUR_LIMIT).chain(last) {
                let their_exit = *their_exit;
                let found = if exit == their_exit {
                    self.report_difference(condition, own, theirs)
                } else {
                    let (leaves, exit_taken) =
                        if exit == Exit::Falls { (*other, their_exit) } else { (*body, exit) };
                    let own = (own.clone(), after.follow_exit(exit));
                    let theirs = (theirs.clone(), after.follow_exit(their_exit));
                    self.report_skip(condition, (leaves, exit_taken), &own, &theirs)
                };
                if found {
                    break;
                }
            }
        }
    }

    fn check_loop(&mut self, header: &Expr, is_for: bool, body: &[Issued]) {
        let causes = self.causes.find(header);
        let concerning = |i: &Issued| causes.iter().find(|c| self.concerns(c, header, i)).cloned();
        let Some((issued, cause)) = body.iter().find_map(|i| Some((i, concerning(i)?))) else { return };
        if let (true, Cause::Rank(_)) = (is_for, cause) {
            let message =
                format!("`{}` is issued once for each item of what only this rank has", issued.name);
            let diagnostic = Diagnostic::warning(&T1444, message);
            let labels = [(header.span, "the loop runs over it")];
            self.finder.report(diagnostic, issued.span, &describe_issue(issued), &labels);
            return;
        }
        // Other items than those of a range may hold own values, in equal numbers.
        let called = header.as_call().and_then(|c| c.function.to_dotted());
        if !is_for || called.as_deref() == Some("range") {
            self.report_difference(header, body, &[]);
        }
    }

    /// A rank that handles an error and goes on has issued fewer collectives than its peers.
    fn check_try(&mut self, body: &[Stmt], handlers: &[Handler], after: &After) {
        for handler in handlers.iter().filter(|h| may_fail_on_one_rank(h)) {
            if let Some(issued) = self.sequences.of_block(&handler.body, self.scope).first() {
                let message =
                    format!("`{}` is issued by the ranks alone that handle an exception", issued.name);
                let diagnostic = Diagnostic::error(&T1438, message);
                self.finder.report(
                    diagnostic,
                    issued.span,
                    &describe_issue(issued),
                    &[(handler.span, "the handler")],
                );
            }
        }
        for handler in handlers.iter().filter(|h| may_fail_on_one_rank(h)) {
            let exit = exit_of(&handler.body);
            let skipped = match exit {
                Exit::Falls | Exit::Raises => None,
                // A collective in the block itself is reported below.
                _ if !self.sequences.of_block(body, self.scope).is_empty() => None,
                _ => after.follow_exit(Exit::Falls).into_iter().next(),
            };
            if let (Some(issued), Some(leaves)) = (skipped, handler.body.last()) {
                let message = format!("a rank that handles an exception leaves before `{}`", issued.name);
                let labels = [(issued.span, "the other ranks issue it here")];
                self.finder.report(
                    Diagnostic::warning(&T1438, message),
                    leaves.span,
                    "this rank leaves",
                    &labels,
                );
            }
        }
        let Some(issued) = self.sequences.of_block(body, self.scope).into_iter().next() else { return };
        if let Some(handler) = handlers.iter().find(|h| !ends_in_error(&h.body) && may_fail_on_one_rank(h)) {
            let message = format!("a rank that fails before `{}` goes on without it", issued.name);
            let diagnostic = Diagnostic::warning(&T1438, message);
            let labels = [(handler.span, "the handler lets the rank go on")];
            self.finder.report(diagnostic, issued.span, &describe_issue(&issued), &labels);
        }
    }

    /// Reports the first difference of two sequences under a condition that may differ between ranks.
    fn report_difference(&mut self, condition: &Expr, own: &[Issued], theirs: &[Issued]) -> bool {
        let Some((cause, issued)) = self.first_difference(condition, own, theirs) else { return false };
        if matches!(cause, Cause::Size(_)) {
            return false;
        }
        let (code, severity, what) = describe_cause(&cause);
        let message = format!("`{}` is issued under a condition on {what}", issued.name);
        let diagnostic = Diagnostic { severity, ..Diagnostic::error(code, message) };
        self.finder.report(
            diagnostic,
            issued.span,
            &describe_issue(&issued),
            &[(condition.span, "the condition")],
        );
        true
    }

    /// Reports an early exit that skips a collective; each way is an arm and what follows it.
    fn report_skip(
        &mut self,
        condition: &Expr,
        (leaves, exit): (&[Stmt], Exit),
        own: &(Vec<Issued>, Vec<Issued>),
        theirs: &(Vec<Issued>, Vec<Issued>),
    ) -> bool {
        let join = |way: &(Vec<Issued>, Vec<Issued>)| [way.0.clone(), way.1.clone()].concat();
        let difference = self.first_difference(condition, &join(own), &join(theirs));
        let Some((cause, issued)) = difference else { return false };
        let is_meant = match (&cause, exit) {
            // An error is for all ranks to see, unless a condition on the rank alone raises it.
            (Cause::Rank(_), Exit::Raises) => {
                evaluate_for_rank(condition, 0).is_some() && !is_range_check(condition)
            }
            (_, Exit::Raises) => false,
            // A size is often the same on all ranks; the caller's tensor and a return are where it was not.
            (Cause::Size(_), _) => exit == Exit::Returns && issued.through.is_none(),
            _ => true,
        };
        if !is_meant {
            return false;
        }
        if own.0.iter().chain(&theirs.0).any(|i| i.span == issued.span) {
            return self.report_difference(condition, &own.0, &theirs.0);
        }
        let (code, severity, what) = describe_cause(&cause);
        let message = format!("a condition on {what} skips `{}`", issued.name);
        let diagnostic = Diagnostic { severity, ..Diagnostic::error(code, message) };
        let at = leaves.last().map_or(condition.span, |s| s.span);
        let skipped = format!("the ranks that go on issue it here{}", describe_function(&issued));
        let labels = [(issued.span, skipped.as_str()), (condition.span, "the condition")];
        self.finder.report(diagnostic, at, "this rank leaves here", &labels);
        true
    }

    /// Returns whether a cause can split the members of the collective's group.
    fn concerns(&self, cause: &Cause, condition: &Expr, issued: &Issued) -> bool {
        match (cause, &issued.group) {
            (Cause::Rank(Some(axis)), Some(group)) => {
                group.to_ascii_lowercase().contains(axis.rsplit('.').next().unwrap_or(axis))
            }
            (Cause::Rank(None), Some(_)) => self.selects_one_rank(condition),
            _ => true,
        }
    }

    /// Returns whether one rank alone, or all but one, satisfy a condition. The members of another group than
    /// the job's may be just the ranks that satisfy `rank < 4` or `rank in members`.
    fn selects_one_rank(&self, condition: &Expr) -> bool {
        let depends_on_rank = |e: &Expr| self.causes.find(e).iter().any(|c| matches!(c, Cause::Rank(_)));
        match &condition.kind {
            ExprKind::Boolean(parts) => {
                let mut parts = parts.iter().filter(|p| depends_on_rank(p)).peekable();
                parts.peek().is_some() && parts.all(|p| self.selects_one_rank(p))
            }
            ExprKind::Not(inner) => self.selects_one_rank(inner),
            ExprKind::Compare(parts, operators) => {
                let is_number =
                    |e: &Expr| matches!(&e.kind, ExprKind::Constant(text) if text.parse::<u32>().is_ok());
                matches!(operators[0].as_str(), "==" | "!=") && parts.iter().any(is_number)
            }
            ExprKind::Name(_) | ExprKind::Attribute(..) | ExprKind::Call(_) => true,
            _ => false,
        }
    }

    fn first_difference(
        &self,
        condition: &Expr,
        own: &[Issued],
        theirs: &[Issued],
    ) -> Option<(Cause, Issued)> {
        if own.is_empty() && theirs.is_empty() {
            return None;
        }
        self.causes.find(condition).into_iter().find_map(|cause| {
            let keep = |all: &[Issued]| -> Vec<Issued> {
                all.iter().filter(|i| self.concerns(&cause, condition, i)).cloned().collect()
            };
            let (own, theirs) = (keep(own), keep(theirs));
            let (a, b) = (signatures(&own), signatures(&theirs));
            let at = a.iter().zip(&b).take_while(|(x, y)| x == y).count();
            let issued = own.get(at).or(theirs.get(at))?.clone();
            Some((cause, issued))
        })
    }
}

/// A statement that waits for its counterpart: position, truth on each sample rank, and what it issues.
type OpenCondition<'i> = (usize, Vec<Option<bool>>, &'i Vec<Issued>);

/// Returns the positions of statements `if` that issue the same collectives under conditions of which
/// each rank satisfies exactly one, with nothing issued between: first one rank prepares, then the others go on.
fn complementary_pairs(block: &[Stmt], issued: &[Vec<Issued>]) -> BTreeSet<usize> {
    let mut out = BTreeSet::new();
    let mut open: Option<OpenCondition<'_>> = None;
    for (i, (statement, issued)) in block.iter().zip(issued).enumerate() {
        if issued.is_empty() {
            continue;
        }
        let truth: Option<Vec<Option<bool>>> = match &statement.kind {
            StmtKind::If(arms, otherwise) if arms.len() == 1 && otherwise.is_empty() => {
                Some(SAMPLE_RANKS.map(|r| evaluate_for_rank(&arms[0].0, r)).collect())
            }
            _ => None,
        };
        let truth = truth.filter(|t| t.iter().all(Option::is_some));
        let closes = match (&open, &truth) {
            (Some((_, first, issued_first)), Some(second)) => {
                first.iter().zip(second).all(|(a, b)| a != b)
                    && signatures(issued_first) == signatures(issued)
            }
            _ => false,
        };
        if closes {
            out.extend(open.take().map(|(first, ..)| first).into_iter().chain([i]));
        } else {
            open = truth.map(|t| (i, t, issued));
        }
    }
    out
}

/// Returns the code, the severity and the words for a cause.
fn describe_cause(cause: &Cause) -> (&'static Code, Severity, String) {
    match cause {
        Cause::Rank(None) => (&T1435, Severity::Error, "the rank".to_string()),
        Cause::Rank(Some(axis)) => (&T1435, Severity::Error, format!("the rank of `{axis}`")),
        Cause::Own(text) => (&T1436, Severity::Error, format!("`{text}`, which each rank has for itself")),
        Cause::Size(text) => {
            (&T1436, Severity::Warning, format!("the size `{text}`, which may be zero on one rank"))
        }
        Cause::Environment(name) => {
            (&T1437, Severity::Warning, format!("the environment variable {name} of this process"))
        }
    }
}

fn describe_issue(issued: &Issued) -> String {
    format!("issued here{}", describe_function(issued))
}

fn describe_function(issued: &Issued) -> String {
    issued.through.as_ref().map_or(String::new(), |f| format!(", in `{f}`"))
}

/// How a block is left, if it always is.
fn exit_of(block: &[Stmt]) -> Exit {
    for statement in block {
        let exit = match &statement.kind {
            StmtKind::Return(_) => Exit::Returns,
            StmtKind::Raise(_) => Exit::Raises,
            StmtKind::Continue => Exit::Continues,
            StmtKind::Break => Exit::Breaks,
            StmtKind::Expr(e) if ends_process(e) => Exit::Raises,
            StmtKind::If(arms, otherwise) => {
                let mut exits = arms.iter().map(|(_, b)| exit_of(b)).chain([exit_of(otherwise)]);
                let first = exits.next().unwrap_or(Exit::Falls);
                if exits.all(|e| e == first) { first } else { Exit::Falls }
            }
            StmtKind::With(_, body) => exit_of(body),
            _ => Exit::Falls,
        };
        if exit != Exit::Falls {
            return exit;
        }
    }
    Exit::Falls
}

fn ends_process(expr: &Expr) -> bool {
    let name = expr.as_call().and_then(|c| c.function.to_dotted()).unwrap_or_default();
    matches!(name.rsplit('.').next(), Some("exit" | "_exit" | "abort" | "quit" | "kill"))
}

/// Returns whether a handler passes its error on, on some way through it.
fn ends_in_error(block: &[Stmt]) -> bool {
    let mut found = false;
    crate::lint::syntax::visit_statements(block, &mut |s| {
        found |= match &s.kind {
            StmtKind::Raise(_) => true,
            StmtKind::Expr(e) => ends_process(e),
            _ => false,
        };
    });
    found
}

/// Errors that one rank may have alone. Another one, such as a missing module or a wrong request, is often the
/// same on all ranks.
const OWN_ERRORS: &[&str] = &[
    "Exception",
    "BaseException",
    "RuntimeError",
    "OutOfMemoryError",
    "MemoryError",
    "TimeoutError",
    "OSError",
    "IOError",
    "ConnectionError",
    "DistError",
    "DistBackendError",
    "DistNetworkError",
];

/// Returns whether a handler is for errors that one rank may have alone.
fn may_fail_on_one_rank(handler: &Handler) -> bool {
    let is_own = |e: &Expr| {
        e.to_dotted().is_some_and(|n| OWN_ERRORS.contains(&n.rsplit('.').next().unwrap_or_default()))
    };
    handler.exceptions.is_empty() || handler.exceptions.iter().any(|e| e.contains(&is_own))
}

/// Returns whether the condition checks the bounds of a rank. An error there is no decision of one rank.
fn is_range_check(condition: &Expr) -> bool {
    condition.contains(&|e| {
        matches!(&e.kind, ExprKind::Compare(_, operators) if operators.iter().any(|o| o.starts_with(['<', '>'])))
    })
}
