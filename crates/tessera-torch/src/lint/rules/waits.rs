//! Whether each collective is waited for, and its result used: T1431, T1439, T1440 and T1443.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Diagnostic, Span};

use super::Finder;
use super::compiled::is_async;
use crate::codes::{T1431, T1439, T1440, T1443};
use crate::lint::causes::{Agreed, Cause, Causes, list_agreed};
use crate::lint::module::{Mode, visit_expressions};
use crate::lint::names::Form;
use crate::lint::syntax::{Call, Expr, ExprKind, Stmt, StmtKind, visit_statements};

/// Follows handles and results through each scope, in the order of the text.
pub(in crate::lint) fn find_missing_waits(finder: &mut Finder<'_>) {
    let agreed = list_agreed(finder.module);
    for scope in 0..finder.module.scopes.len() {
        let body = finder.module.scopes[scope].body;
        let names = ScopeNames::from_scope(finder, scope);
        let mut walk = Walk { finder: &mut *finder, agreed: &agreed, names, scope };
        walk.visit_block(body, &mut BTreeMap::new());
        walk.check_unused_results(body);
        walk.check_send_order(body);
    }
}

/// A tensor that a collective has not finished: what must be waited for, and where it was issued.
#[derive(Debug, Clone, PartialEq)]
struct Pending {
    /// The variable of the work object, or of the result without its wait; empty if nobody keeps it.
    handle: String,
    collective: String,
    issued: Span,
    /// The variable that holds the result of the wait, once there is one.
    waited_as: Option<String>,
}

/// Unfinished tensors by name.
type State = BTreeMap<String, Pending>;

/// Unfinished tensors that are followed at the same time.
const STATE_LIMIT: usize = 64;

/// What the statements of a scope do with its names.
struct ScopeNames {
    /// Names that `global` or `nonlocal` makes assignable.
    globals: BTreeSet<String>,
    /// Lists whose members are all waited for: `for h in handles: h.wait()`.
    waited_lists: BTreeSet<String>,
    /// The first two statements that read each name, here or in an inner function.
    readers: BTreeMap<String, BTreeSet<Span>>,
}

impl ScopeNames {
    fn from_scope(finder: &Finder<'_>, scope: usize) -> ScopeNames {
        let mut names =
            ScopeNames { globals: BTreeSet::new(), waited_lists: BTreeSet::new(), readers: BTreeMap::new() };
        let is_wait = |e: &Expr| matches!(&e.kind, ExprKind::Attribute(_, name) if name == "wait");
        visit_statements(finder.module.scopes[scope].body, &mut |s| {
            let mut waiting: Vec<&Expr> = s.list_expressions();
            waiting.retain(|e| e.contains(&is_wait));
            match &s.kind {
                StmtKind::Global(globals) => names.globals.extend(globals.iter().cloned()),
                StmtKind::For(_, iterable, body, _) => {
                    let mut waits = false;
                    visit_expressions(body, &mut |e| waits |= is_wait(e));
                    waiting.extend(waits.then_some(iterable));
                }
                _ => {}
            }
            for e in waiting {
                e.visit(&mut |part| names.waited_lists.extend(part.to_dotted()));
            }
        });
        for s in std::iter::once(scope).chain(finder.module.inner_scopes(scope)) {
            visit_statements(finder.module.scopes[s].body, &mut |s| names.add_reads(s));
        }
        names
    }

    fn add_reads(&mut self, s: &Stmt) {
        let is_target = |e: &Expr| matches!(&s.kind, StmtKind::Assign(t, _) if t.iter().any(|t| t == e));
        for e in s.list_expressions().into_iter().filter(|e| !is_target(e)) {
            e.visit(&mut |part| {
                if let ExprKind::Name(name) = &part.kind {
                    let readers = self.readers.entry(name.clone()).or_default();
                    if readers.len() < 2 {
                        readers.insert(s.span);
                    }
                }
            });
        }
    }
}

struct Walk<'w, 'a> {
    finder: &'w mut Finder<'a>,
    agreed: &'w Agreed,
    names: ScopeNames,
    scope: usize,
}

impl Walk<'_, '_> {
    fn visit_block(&mut self, block: &[Stmt], state: &mut State) {
        for statement in block {
            self.visit_statement(statement, state);
            if let StmtKind::Return(_) | StmtKind::Raise(_) | StmtKind::Continue | StmtKind::Break =
                statement.kind
            {
                // What follows is another way through the function.
                state.clear();
                return;
            }
            let blocks = statement.list_blocks();
            if blocks.is_empty() {
                continue;
            }
            let states: Vec<State> = blocks
                .into_iter()
                .map(|inner| {
                    let mut own = state.clone();
                    self.visit_block(inner, &mut own);
                    own
                })
                .collect();
            if let (StmtKind::With(..), Some(own)) = (&statement.kind, states.first()) {
                state.clone_from(own);
            }
            // A wait on one way counts: which ways belong together is not known.
            state.retain(|name, pending| states.iter().all(|s| s.get(name) == Some(pending)));
        }
    }

    fn visit_statement(&mut self, statement: &Stmt, state: &mut State) {
        let (targets, value): (&[Expr], Option<&Expr>) = match &statement.kind {
            StmtKind::Assign(targets, value) => (targets, Some(value)),
            StmtKind::Expr(value) | StmtKind::Return(Some(value)) => (&[], Some(value)),
            _ => (&[], None),
        };
        self.report_escapes(statement, state);
        // A second name for a tensor does not read it.
        let renamed = value
            .filter(|v| !targets.is_empty() && matches!(v.kind, ExprKind::Name(_) | ExprKind::Attribute(..)));
        let renamed = renamed.and_then(Expr::to_dotted).and_then(|name| state.get(&name).cloned());
        for e in statement.list_expressions() {
            if renamed.is_none() {
                self.check_statement_reads(statement, e, targets, state);
            }
            e.visit(&mut |part| {
                clear_waited(part, state);
                if !std::ptr::eq(part, e) && self.is_wait(part) {
                    let name = part.as_call().and_then(|c| c.positional.first()).and_then(Expr::to_dotted);
                    state.remove(&name.unwrap_or_default());
                }
            });
        }
        if let Some(value) = value {
            let is_dropped = matches!(statement.kind, StmtKind::Expr(_));
            self.record_wait_result(value, targets, is_dropped, state);
        }
        for name in targets.iter().flat_map(crate::lint::module::target_names) {
            state.remove(&name);
            state.retain(|_, p| p.handle != name || p.waited_as.is_some());
        }
        if let (Some(pending), [Expr { kind: ExprKind::Name(name), .. }]) = (renamed, targets) {
            state.insert(name.clone(), pending);
        }
        if let Some(value) = value {
            self.record_issue(statement, value, targets, state);
        }
    }

    /// Reports reads of unfinished tensors. `return out, work` hands both on, and reads neither.
    fn check_statement_reads(&mut self, statement: &Stmt, e: &Expr, targets: &[Expr], state: &mut State) {
        let handed_on = match (&statement.kind, &e.kind) {
            (StmtKind::Return(_), ExprKind::Sequence(parts)) => parts.as_slice(),
            _ => &[],
        };
        let names: Vec<String> = handed_on.iter().filter_map(Expr::to_dotted).collect();
        state.retain(|_, p| p.waited_as.is_some() || !names.contains(&p.handle));
        self.check_reads(e, targets, state);
    }

    /// Reports reads of unfinished tensors in an expression.
    fn check_reads(&mut self, expr: &Expr, targets: &[Expr], state: &mut State) {
        if targets.iter().any(|t| t == expr) {
            return;
        }
        // Another in-place operation on the same tensor is ordered after the first by its stream.
        let collective = self.finder.module.names.find_collective(expr);
        if self.is_wait(expr) || collective.is_some_and(|c| c.form == Form::InPlace) {
            return;
        }
        if let ExprKind::Attribute(_, name) = &expr.kind
            && ["shape", "dtype", "device", "ndim", "wait", "size", "numel", "record_stream"]
                .contains(&name.as_str())
        {
            return;
        }
        if let Some(name) = matches!(expr.kind, ExprKind::Name(_) | ExprKind::Attribute(..))
            .then(|| expr.to_dotted())
            .flatten()
            && let Some(pending) = state.remove(&name)
        {
            let (message, hint) = match &pending.waited_as {
                Some(result) => (
                    format!("`{name}` is read after its wait, and the result of the wait is `{result}`"),
                    format!("read `{result}`"),
                ),
                None => (
                    format!("`{name}` is read before the wait for `{}`", pending.collective),
                    if name == pending.handle {
                        format!("read the result of `wait_tensor({name})`")
                    } else {
                        format!("call `{}.wait()` first", pending.handle)
                    },
                ),
            };
            let labels = [(pending.issued, "issued here")];
            let diagnostic = Diagnostic::error(&T1439, message).with_hint(hint);
            self.finder.report(diagnostic, expr.span, "read here", &labels);
            return;
        }
        for part in expr.list_parts() {
            self.check_reads(part, targets, state);
        }
    }

    /// `z = wait_tensor(y)`: from now on `z` is the result, and `y` is not.
    fn record_wait_result(&mut self, value: &Expr, targets: &[Expr], is_dropped: bool, state: &mut State) {
        if !self.is_wait(value) {
            return;
        }
        let Some(name) = value.as_call().and_then(|c| c.positional.first()).and_then(Expr::to_dotted) else {
            return;
        };
        let issued = state.remove(&name).map_or(value.span, |p| p.issued);
        match targets.first().and_then(Expr::to_dotted) {
            Some(result) if result != name => {
                let collective = "wait_tensor".to_string();
                let pending = Pending { handle: name.clone(), collective, issued, waited_as: Some(result) };
                state.insert(name, pending);
            }
            None if is_dropped => {
                let message = format!("the result of the wait for `{name}` is dropped");
                let diagnostic = Diagnostic::warning(&T1440, message);
                let diagnostic = diagnostic.with_hint(format!("write `{name} = wait_tensor({name})`"));
                self.finder.report(diagnostic, value.span, "dropped", &[]);
            }
            _ => {}
        }
    }

    /// Reports handles that are returned or assigned to an attribute.
    fn report_escapes(&mut self, statement: &Stmt, state: &State) {
        let (value, to) = match &statement.kind {
            StmtKind::Return(Some(value)) => (value, "returned here"),
            StmtKind::Assign(targets, value)
                if targets
                    .iter()
                    .any(|t| matches!(t.kind, ExprKind::Attribute(..) | ExprKind::Subscript(..))) =>
            {
                (value, "kept here")
            }
            _ => return,
        };
        let kept: Vec<&Expr> = match &value.kind {
            ExprKind::Sequence(parts) => parts.iter().collect(),
            _ => vec![value],
        };
        for name in kept.into_iter().filter_map(Expr::to_dotted) {
            for (tensor, pending) in state {
                if pending.handle == name && *tensor != name && pending.waited_as.is_none() {
                    self.report_kept(&pending.collective, value.span, to);
                }
            }
        }
    }

    fn report_kept(&mut self, collective: &str, span: Span, to: &str) {
        let message = format!("the work object of `{collective}` leaves its function");
        self.finder.report(Diagnostic::warning(&T1431, message), span, to, &[]);
    }

    fn record_issue(&mut self, statement: &Stmt, value: &Expr, targets: &[Expr], state: &mut State) {
        let names = &self.finder.module.names;
        let mut async_calls = Vec::new();
        value.visit(&mut |e| {
            let is_kept = names.find_collective(e).is_some_and(|c| c.form == Form::InPlace);
            async_calls.extend(e.as_call().filter(|c| is_kept && is_async(c)).map(|c| (e, c)));
        });
        let compiled = self.finder.module.scopes[self.scope].mode == Mode::Compiled;
        for (expr, call) in async_calls {
            let Some(collective) = self.finder.module.names.find_collective(expr) else { continue };
            if called_method(value, expr).as_deref() == Some("wait") {
                continue;
            }
            let is_whole = std::ptr::eq(expr, value);
            let target =
                targets.first().filter(|t| matches!(t.kind, ExprKind::Name(_))).and_then(Expr::to_dotted);
            let handle =
                target.clone().filter(|name| is_whole && !self.names.globals.contains(name.as_str()));
            // `handles.append(…)`, or a list of all in one expression.
            let appended = value.as_call().and_then(|c| c.function.to_dotted());
            let list = appended.and_then(|f| Some(f.strip_suffix(".append")?.to_string())).or(target);
            let is_statement = matches!(statement.kind, StmtKind::Expr(_));
            if compiled || list.is_some_and(|l| !is_whole && self.names.waited_lists.contains(&l)) {
            } else if is_whole && is_statement {
                let message =
                    format!("nobody can wait for `{}`: its work object is dropped", collective.name);
                self.finder.report(Diagnostic::error(&T1440, message), expr.span, "dropped", &[]);
            } else if handle.is_none() {
                self.report_kept(&collective.name, expr.span, "kept here");
            }
            if let (Some(handle), Some(written)) =
                (handle, collective.find_written(call).and_then(Expr::to_dotted))
            {
                let pending =
                    Pending { handle, collective: collective.name, issued: expr.span, waited_as: None };
                insert_pending(state, written, pending);
            }
        }
        let raw = self.finder.module.names.find_collective(value).filter(|c| c.form == Form::RawFunctional);
        if let (Some(collective), Some(name)) = (raw, targets.first().and_then(Expr::to_dotted)) {
            let pending = Pending {
                handle: name.clone(),
                collective: collective.name,
                issued: value.span,
                waited_as: None,
            };
            insert_pending(state, name, pending);
        }
    }

    fn is_wait(&self, expr: &Expr) -> bool {
        let path = expr.as_call().map(|c| self.finder.module.names.resolve_called(c)).unwrap_or_default();
        let path = path.strip_suffix(".default").unwrap_or(&path);
        path.ends_with("functional_collectives.wait_tensor") || path.ends_with("c10d_functional.wait_tensor")
    }

    /// A functional collective changes nothing: who drops its result uses the operand.
    fn check_unused_results(&mut self, body: &[Stmt]) {
        let mut dropped = Vec::new();
        let names = &self.finder.module.names;
        visit_statements(body, &mut |s| {
            let (StmtKind::Expr(value) | StmtKind::Assign(_, value)) = &s.kind else { return };
            let functional = names.find_collective(value).filter(|c| {
                matches!(c.form, Form::Functional | Form::RawFunctional) && !c.name.ends_with('_')
            });
            let Some(collective) = functional else { return };
            let target = match &s.kind {
                StmtKind::Assign(targets, _) => match targets.as_slice() {
                    [Expr { kind: ExprKind::Name(name), .. }] => Some(name.clone()),
                    _ => return,
                },
                _ => None,
            };
            dropped.push((collective.name, value.span, s.span, target));
        });
        for (collective, span, statement, target) in dropped {
            let is_read = target.as_ref().is_some_and(|name| {
                let readers = self.names.readers.get(name);
                // A variable of the module may be read by another file.
                name == "_"
                    || self.scope == 0
                    || self.names.globals.contains(name)
                    || readers.is_some_and(|r| r.iter().any(|s| *s != statement))
            });
            if !is_read {
                let message = format!(
                    "the result of the functional `{collective}` is not used, and its operand is unchanged"
                );
                self.finder.report(Diagnostic::error(&T1440, message), span, "dropped", &[]);
            }
        }
    }

    /// Returns the call of a blocking send or receive, if the statement is one.
    fn point_to_point<'s>(&self, statement: &'s Stmt, name: &str) -> Option<(Span, &'s Call)> {
        let (StmtKind::Expr(e) | StmtKind::Assign(_, e)) = &statement.kind else { return None };
        let call = e.as_call()?;
        (self.finder.module.names.resolve_called(call) == format!("torch.distributed.{name}"))
            .then_some((e.span, call))
    }

    /// Reports a blocking send before a receive in code that all ranks run alike.
    fn check_send_order(&mut self, block: &[Stmt]) {
        let causes = Causes::new(self.finder.module, self.agreed, self.scope);
        let mut found = None;
        for (i, statement) in block.iter().enumerate() {
            let Some((send, call)) = self.point_to_point(statement, "send") else { continue };
            // A peer that follows from the own rank makes this a ring.
            let is_ring = call.find_argument("dst", 1).is_some_and(|dst| {
                causes.find(dst).iter().any(|c| matches!(c, Cause::Rank(_))) || is_neighbour(dst)
            });
            let received =
                block[i + 1..].iter().take(STATE_LIMIT).find_map(|s| self.point_to_point(s, "recv"));
            if let (true, Some((recv, _))) = (is_ring, received) {
                found = Some((send, recv));
            }
        }
        if let Some((send, recv)) = found {
            let message = "every rank sends before it receives, and no send can complete";
            let labels = [(recv, "the receive that nobody reaches")];
            self.finder.report(
                Diagnostic::error(&T1443, message),
                send,
                "blocks until the peer receives",
                &labels,
            );
        }
        for statement in block {
            // Under a condition on the rank, half of the ranks may receive first.
            if !matches!(statement.kind, StmtKind::If(..)) {
                for inner in statement.list_blocks() {
                    self.check_send_order(inner);
                }
            }
        }
    }
}

/// Removes what the expression waits for. A handle that is passed on or collected may be waited for anywhere.
fn clear_waited(expr: &Expr, state: &mut State) {
    if let ExprKind::Call(call) = &expr.kind
        && let ExprKind::Attribute(object, method) = &call.function.kind
    {
        let object = object.to_dotted();
        let is_tracked = |state: &State| state.values().any(|p| Some(&p.handle) == object.as_ref());
        match method.as_str() {
            "wait" | "synchronize" if !is_tracked(state) => state.retain(|_, p| p.waited_as.is_some()),
            _ => {}
        }
    }
    if let ExprKind::Name(_) | ExprKind::Attribute(..) = expr.kind {
        let name = expr.to_dotted();
        state.retain(|tensor, p| {
            p.waited_as.is_some() || *tensor == p.handle || Some(&p.handle) != name.as_ref()
        });
    }
}

/// Returns the method that is called on `inner` in `outer`: `wait` in `dist.all_reduce(x, async_op=True).wait()`.
fn called_method(outer: &Expr, inner: &Expr) -> Option<String> {
    let mut found = None;
    outer.visit(&mut |e| {
        if let ExprKind::Attribute(value, method) = &e.kind
            && std::ptr::eq(&**value, inner)
        {
            found = Some(method.clone());
        }
    });
    found
}

/// Names of a neighbour in a ring.
fn is_neighbour(peer: &Expr) -> bool {
    let name = peer.to_dotted().unwrap_or_default().to_ascii_lowercase();
    ["next", "right", "succ"].iter().any(|word| name.contains(word))
}

fn insert_pending(state: &mut State, tensor: String, pending: Pending) {
    if state.len() < STATE_LIMIT {
        state.insert(tensor, pending);
    }
}
