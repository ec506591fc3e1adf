//! What does not belong into compiled code, and the reverse: T1431 to T1434, T1441 and T1442.

use tessera_base::Diagnostic;

use super::Finder;
use crate::codes::{T1431, T1432, T1433, T1434, T1441, T1442};
use crate::lint::module::{Mode, visit_expressions};
use crate::lint::names::Form;
use crate::lint::syntax::{Call, Expr, ExprKind, Stmt, StmtKind, visit_statements};

/// Functions that act on the host, or read a clock.
const SIDE_EFFECTS: &[&str] = &[
    "print",
    "input",
    "open",
    "time.",
    "logging.",
    "warnings.warn",
    "random.",
    "sys.stdout.",
    "sys.stderr.",
];

/// Methods that copy from the device to the host.
const HOST_READS: &[&str] = &["item", "tolist", "cpu", "numpy"];

/// Methods that change a list, set or dict.
const MUTATIONS: &[&str] =
    &["append", "extend", "add", "update", "insert", "pop", "remove", "clear", "setdefault"];

/// Looks at each function under the mode in which it runs.
pub(in crate::lint) fn find_misplaced_calls(finder: &mut Finder<'_>) {
    let module = finder.module;
    let loggers = logger_names(finder);
    for scope in 0..module.scopes.len() {
        let walk = Walk { scope, loggers: &loggers };
        let mode = module.scopes[scope].mode;
        if mode == Mode::Compiled {
            walk.check_parameters(finder);
        }
        walk.visit_block(finder, module.scopes[scope].body, mode);
    }
}

struct Walk<'w> {
    scope: usize,
    loggers: &'w [String],
}

impl Walk<'_> {
    fn visit_block(&self, finder: &mut Finder<'_>, block: &[Stmt], mut mode: Mode) {
        for statement in block {
            for e in statement.list_expressions() {
                let mut calls = Vec::new();
                e.visit(&mut |part| calls.extend(part.as_call().map(|c| (part, c))));
                for (part, call) in calls {
                    self.check_call(finder, part, call, mode);
                }
            }
            if mode == Mode::Compiled {
                self.check_globals(finder, statement);
            }
            let StmtKind::If(arms, otherwise) = &statement.kind else {
                for inner in statement.list_blocks() {
                    self.visit_block(finder, inner, mode);
                }
                continue;
            };
            let mut rest = mode;
            for (condition, body) in arms {
                let in_arm = match finder.module.names.tests_compiling(condition) {
                    Some(compiling) => {
                        let modes = [Mode::Eager, Mode::Compiled];
                        rest = modes[usize::from(!compiling)];
                        modes[usize::from(compiling)]
                    }
                    None => rest,
                };
                self.visit_block(finder, body, in_arm);
                // After `if is_compiling(): return …` the rest runs eagerly.
                let leaves = matches!(
                    body.last().map(|s| &s.kind),
                    Some(StmtKind::Return(_) | StmtKind::Raise(_) | StmtKind::Continue)
                );
                if leaves {
                    mode = rest;
                }
            }
            self.visit_block(finder, otherwise, rest);
        }
    }

    fn check_call(&self, finder: &mut Finder<'_>, expr: &Expr, call: &Call, mode: Mode) {
        let path = finder.module.names.resolve_called(call);
        if let Some(collective) = finder.module.names.find_collective(expr) {
            let name = &collective.name;
            match (collective.form, mode) {
                (Form::InPlace, Mode::Compiled) if is_async(call) => {
                    let message = format!("`{name}` makes a work object in compiled code");
                    finder.report(Diagnostic::error(&T1431, message), expr.span, "async_op=True", &[]);
                }
                (Form::InPlace, Mode::Compiled) => {
                    let message = format!("`{name}` works in place in compiled code");
                    finder.report(Diagnostic::error(&T1433, message), expr.span, "in place", &[]);
                }
                (Form::Other, Mode::Compiled) if name.contains("new_") || name == "init_device_mesh" => {
                    let message = format!("`{name}` makes a process group in compiled code");
                    finder.report(Diagnostic::error(&T1432, message), expr.span, "made here", &[]);
                }
                (Form::Functional | Form::RawFunctional, Mode::Eager) => {
                    self.report_eager(finder, expr, name)
                }
                (Form::Functional | Form::RawFunctional, Mode::Unknown) if finder.module.decides_compile => {
                    self.report_eager(finder, expr, name);
                }
                _ => {}
            }
            if mode == Mode::Compiled {
                self.check_group(finder, collective.find_group(call));
            }
            return;
        }
        if mode == Mode::Compiled {
            self.check_host(finder, expr, call, &path);
        }
    }

    fn report_eager(&self, finder: &mut Finder<'_>, expr: &Expr, name: &str) {
        let message = format!("the functional `{name}` runs eagerly");
        finder.report(Diagnostic::warning(&T1434, message), expr.span, "not in compiled code", &[]);
    }

    /// Reports a group that was made elsewhere in the file as an object.
    fn check_group(&self, finder: &mut Finder<'_>, group: Option<&Expr>) {
        let Some((group, name)) = group.and_then(|g| Some((g, g.to_dotted()?))) else { return };
        let made = finder.module.values_of(&name, self.scope).iter().map(|(_, value)| *value).find(|value| {
            value.as_call().is_some_and(|c| {
                let path = finder.module.names.resolve_called(c);
                path.starts_with("torch.distributed.new_") || path.ends_with(".get_group")
            })
        });
        if let Some(made) = made {
            let message = format!("compiled code captures the process group `{name}`");
            let labels = [(made.span, "made here")];
            finder.report(Diagnostic::error(&T1432, message), group.span, "captured here", &labels);
        }
    }

    /// Reports parameters of compiled functions that are groups.
    fn check_parameters(&self, finder: &mut Finder<'_>) {
        let scope = &finder.module.scopes[self.scope];
        let Some(function) = scope.function else { return };
        let mut groups = Vec::new();
        visit_expressions(scope.body, &mut |e| {
            let group = finder.module.names.find_collective(e).and_then(|c| c.find_group(e.as_call()?));
            groups.extend(group.and_then(|g| Some((g.to_dotted()?, g.span))));
        });
        for (name, annotation) in &function.parameters {
            let is_text = annotation.as_ref().and_then(Expr::to_dotted).as_deref() == Some("str");
            let annotated = annotation.as_ref().filter(|a| {
                a.contains(&|e| match &e.kind {
                    ExprKind::Constant(text) => text.contains("ProcessGroup"),
                    _ => e.to_dotted().is_some_and(|n| n.ends_with("ProcessGroup")),
                })
            });
            let passed = groups.iter().find(|(group, _)| group == name && !is_text).map(|(_, span)| *span);
            if let Some(span) = annotated.map(|a| a.span).or(passed) {
                let message = format!("`{}` is compiled and takes the process group `{name}`", function.name);
                finder.report(Diagnostic::error(&T1432, message), span, "a process group", &[]);
            }
        }
    }

    fn check_host(&self, finder: &mut Finder<'_>, expr: &Expr, call: &Call, path: &str) {
        let method = match &call.function.kind {
            ExprKind::Attribute(_, name) => name.as_str(),
            _ => "",
        };
        let object = call.function.to_dotted();
        let object = object.as_deref().and_then(|o| o.rsplit_once('.')).map_or("", |(o, _)| o);
        let to_host = method == "to"
            && matches!(call.positional.first().map(|e| &e.kind), Some(ExprKind::Constant(c)) if c == "cpu");
        if path == "torch.cuda.synchronize"
            || to_host
            || (HOST_READS.contains(&method) && call.positional.is_empty())
        {
            let message = format!("compiled code reads from the device: `.{method}()`");
            finder.report(Diagnostic::warning(&T1442, message), expr.span, "the host waits here", &[]);
            return;
        }
        let acts =
            SIDE_EFFECTS.iter().any(|e| if e.ends_with('.') { path.starts_with(e) } else { path == *e });
        let is_local = finder.module.find_function(path, self.scope).is_some();
        let mutated = MUTATIONS.contains(&method) && self.is_module_variable(finder, object);
        if (acts && !is_local) || self.loggers.iter().any(|l| l == object) || mutated {
            let what = if mutated { format!("changes `{object}`") } else { format!("calls `{path}`") };
            let message = format!("compiled code {what}, a side effect outside of the graph");
            finder.report(Diagnostic::warning(&T1441, message), expr.span, "side effect", &[]);
        }
    }

    fn check_globals(&self, finder: &mut Finder<'_>, statement: &Stmt) {
        let found = match &statement.kind {
            StmtKind::Global(names) => names.first().cloned(),
            StmtKind::Assign(targets, _) => targets
                .iter()
                .filter(|t| matches!(t.kind, ExprKind::Subscript(..)))
                .filter_map(Expr::to_dotted)
                .find(|name| self.is_module_variable(finder, name)),
            _ => None,
        };
        if let Some(name) = found {
            let message = format!("compiled code changes `{name}`, a side effect outside of the graph");
            finder.report(Diagnostic::warning(&T1441, message), statement.span, "side effect", &[]);
        }
    }

    /// Returns whether a name is a variable of the module, and of no function in between.
    fn is_module_variable(&self, finder: &Finder<'_>, name: &str) -> bool {
        let scope = &finder.module.scopes[self.scope];
        !scope.has_parameter(name)
            && !scope.assigned.contains_key(name)
            && finder.module.scopes[0].assigned.contains_key(name)
    }
}

/// Returns whether a call asks for a work object.
pub(super) fn is_async(call: &Call) -> bool {
    let value = call.named.iter().find(|(name, _)| name == "async_op").map(|(_, e)| &e.kind);
    matches!(value, Some(ExprKind::Constant(text)) if text == "True")
}

/// Lists the variables that hold a logger.
fn logger_names(finder: &Finder<'_>) -> Vec<String> {
    let mut out = Vec::new();
    visit_statements(finder.module.scopes[0].body, &mut |s| {
        if let StmtKind::Assign(targets, value) = &s.kind
            && value.as_call().is_some_and(|c| finder.module.names.resolve_called(c).ends_with("getLogger"))
        {
            out.extend(targets.iter().filter_map(Expr::to_dotted));
        }
    });
    out
}
