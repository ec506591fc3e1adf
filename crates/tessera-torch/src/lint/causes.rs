//! Finds what a condition depends on that may differ between ranks.

use std::cell::Cell;
use std::collections::BTreeMap;

use super::module::Module;
use super::names::Collective;
use super::syntax::{Call, Expr, ExprKind};

/// Assignments that are followed from a condition to its origin.
const FOLLOW_LIMIT: usize = 6;

/// Parts of expressions that one search looks at. Names that are each assigned from two others double the
/// search with each assignment.
const STEP_LIMIT: u32 = 500;

/// What may differ between ranks.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// The number of the rank: in the job, or on the named axis (`tp`, `local`).
    Rank(Option<String>),
    /// A value that each rank computes or measures for itself, as its text.
    Own(String),
    /// The size of a tensor, which may be zero on one rank.
    Size(String),
    /// A variable of the environment.
    Environment(String),
}

/// Words in the names of variables that switch a debug feature.
const DEBUG_WORDS: &[&str] =
    &["DEBUG", "TRACE", "CHECK", "VERBOSE", "PROFIL", "DUMP", "ASSERT", "VALIDAT", "NAN", "LOG_"];

/// Methods and functions that turn the contents of a tensor into a Python value.
const TENSOR_READS: &[&str] = &[
    "item",
    "tolist",
    "any",
    "all",
    "sum",
    "max",
    "min",
    "mean",
    "norm",
    "isnan",
    "isinf",
    "isfinite",
    "equal",
    "allclose",
    "count_nonzero",
];

/// Functions whose result each process has for itself.
const OWN_VALUES: &[&str] = &[
    "time.time",
    "time.monotonic",
    "time.perf_counter",
    "random.random",
    "torch.cuda.memory_allocated",
    "torch.cuda.memory_reserved",
    "torch.cuda.mem_get_info",
];

/// Functions of Python whose result depends on what they are given.
const BUILTINS: &[&str] = &[
    "abs",
    "any",
    "all",
    "bool",
    "enumerate",
    "int",
    "len",
    "list",
    "max",
    "min",
    "range",
    "set",
    "str",
    "sum",
    "tuple",
];

/// Parts of the names of functions whose result all ranks agree on.
const AGREEING: &[&str] = &["reduce", "broadcast", "gather", "sync", "agree", "consensus"];

/// The tensors that collectives write.
#[derive(Debug)]
pub struct Agreed {
    /// For each scope, the names with the position of the first call.
    scopes: Vec<BTreeMap<String, usize>>,
    /// Parts of expressions that the current search has looked at.
    steps: Cell<u32>,
}

/// Reads the causes of conditions in one scope of a file.
#[derive(Debug, Clone, Copy)]
pub struct Causes<'a> {
    module: &'a Module<'a>,
    agreed: &'a Agreed,
    scope: usize,
}

impl<'a> Causes<'a> {
    /// Creates the reader for a scope; `agreed` comes from [`list_agreed`].
    #[must_use]
    pub fn new(module: &'a Module<'a>, agreed: &'a Agreed, scope: usize) -> Causes<'a> {
        Causes { module, agreed, scope }
    }

    /// Returns what the value of an expression depends on.
    #[must_use]
    pub fn find(&self, expr: &Expr) -> Vec<Cause> {
        let mut out = Vec::new();
        self.agreed.steps.set(0);
        self.collect_causes(expr, expr.span.start, FOLLOW_LIMIT, &mut out);
        // `any(v.item() for v in gathered)` reads what a collective wrote, under another name.
        let is_agreed = |e: &Expr| {
            let name = matches!(e.kind, ExprKind::Name(_) | ExprKind::Attribute(..)).then(|| e.to_dotted());
            name.flatten().is_some_and(|n| self.is_agreed_name(&n, expr.span.start, FOLLOW_LIMIT))
        };
        if expr.contains(&is_agreed) {
            out.retain(|c| !matches!(c, Cause::Own(_)));
        }
        out.sort();
        out.dedup();
        out
    }

    /// Counts a step, and returns whether the search has taken too many.
    fn is_exhausted(&self) -> bool {
        self.agreed.steps.set(self.agreed.steps.get() + 1);
        self.agreed.steps.get() > STEP_LIMIT
    }

    fn collect_causes(&self, expr: &Expr, at: usize, follow: usize, out: &mut Vec<Cause>) {
        if self.is_exhausted() {
            return;
        }
        match &expr.kind {
            ExprKind::Call(call) if self.collect_call(call, at, out) => return,
            ExprKind::Compare(parts, operators) => {
                out.extend(self.zero_size(parts, operators));
                // A missing value is missing on all ranks.
                if operators.iter().any(|o| o.starts_with("is")) {
                    return;
                }
            }
            ExprKind::Subscript(value, index) => {
                let path = self.module.names.resolve(value);
                if path.as_deref() == Some("os.environ") {
                    return out.extend(index.first().and_then(environment_cause));
                }
            }
            ExprKind::Name(_) | ExprKind::Attribute(..) => {
                let Some(name) = expr.to_dotted() else { return };
                if self.is_agreed_name(&name, at, FOLLOW_LIMIT) {
                    return;
                }
                let before = out.len();
                if let (true, Some((scope, value))) = (follow > 0, self.last_value(&name, at)) {
                    Causes { scope, ..*self }.collect_causes(value, value.span.start, follow - 1, out);
                }
                if out.len() == before {
                    out.extend(rank_axis(&name).map(Cause::Rank));
                }
                return;
            }
            _ => {}
        }
        let before = out.len();
        for part in expr.list_parts() {
            self.collect_causes(part, at, follow, out);
        }
        if expr.as_call().is_some_and(|c| !self.passes_rank_on(c)) {
            let own = out.split_off(before).into_iter().filter(|c| !matches!(c, Cause::Rank(_)));
            out.extend(own.collect::<Vec<_>>());
        }
    }

    /// Returns whether a call that is given a rank is known to return something that depends on it. What
    /// `make_group(rank)` returns may be the same everywhere.
    fn passes_rank_on(&self, call: &Call) -> bool {
        let path = self.module.names.resolve_called(call);
        let name = path.rsplit('.').next().unwrap_or_default();
        BUILTINS.contains(&path.as_str()) || name.starts_with("is_") || name.starts_with("should_")
    }

    /// Adds the causes of a call, and returns whether the arguments need no further look.
    fn collect_call(&self, call: &Call, at: usize, out: &mut Vec<Cause>) -> bool {
        let path = self.module.names.resolve_called(call);
        let (object, method) = path.rsplit_once('.').unwrap_or(("", &path));
        let method = if path.is_empty() {
            // A method of an expression without a name: `(x > 0).all()`.
            match &call.function.kind {
                ExprKind::Attribute(_, name) => name.as_str(),
                _ => "",
            }
        } else {
            method
        };
        match method {
            "get_rank" | "get_local_rank" | "get_group_rank" | "get_coordinate" => {
                let group = call.positional.first().or(call.named.first().map(|(_, e)| e));
                out.push(Cause::Rank(match (method, group) {
                    ("get_rank", None) if object != "self" => None,
                    (_, group) => Some(group.and_then(Expr::to_dotted).unwrap_or_else(|| object.to_string())),
                }));
                return true;
            }
            "current_device" => {
                out.push(Cause::Rank(Some("local".to_string())));
                return true;
            }
            // `is_main_process()`
            _ if call.positional.is_empty() && rank_axis(method).is_some() => {
                out.extend(rank_axis(method).map(Cause::Rank));
                return true;
            }
            "getenv" | "get" if path == "os.getenv" || object == "os.environ" => {
                out.extend(call.positional.first().and_then(environment_cause));
                return true;
            }
            _ => {}
        }
        if is_agreeing(method) {
            return true;
        }
        let own = OWN_VALUES.contains(&path.as_str());
        let reads_tensor =
            TENSOR_READS.contains(&method) && matches!(call.function.kind, ExprKind::Attribute(..));
        if own || (reads_tensor && !self.is_agreed(call, at)) {
            let text = if path.is_empty() { format!("….{method}()") } else { format!("{path}()") };
            out.push(Cause::Own(text));
            return true;
        }
        reads_tensor
    }

    /// Returns whether a collective wrote what the call reads, directly or through assignments.
    fn is_agreed(&self, call: &Call, at: usize) -> bool {
        let mut names = Vec::new();
        let mut see = |e: &Expr| names.extend(e.to_dotted());
        for e in std::iter::once(&call.function).chain(&call.positional) {
            e.visit(&mut see);
        }
        names.iter().any(|name| self.is_agreed_name(name, at, FOLLOW_LIMIT))
    }

    fn is_agreed_name(&self, name: &str, at: usize, follow: usize) -> bool {
        // What is written as `state` is agreed as `state.loss`, too.
        let mut ends = name.match_indices('.').map(|(end, _)| end).chain([name.len()]);
        if ends.any(|end| self.agreed.scopes[self.scope].get(&name[..end]).is_some_and(|p| *p < at)) {
            return true;
        }
        if self.is_exhausted() {
            return false;
        }
        if follow == 0 {
            return false;
        }
        let Some((scope, value)) = self.last_value(name, at) else { return false };
        let (there, position) = (Causes { scope, ..*self }, value.span.start);
        value.contains(&|e| {
            let agreeing = e.as_call().is_some_and(|c| is_agreeing(&self.module.names.resolve_called(c)));
            agreeing
                || matches!(e.kind, ExprKind::Name(_) | ExprKind::Attribute(..))
                    && e.to_dotted()
                        .is_some_and(|n| n != name && there.is_agreed_name(&n, position, follow - 1))
        })
    }

    /// The value that a name was last given before a position, or at all, if that is in another function.
    fn last_value(&self, name: &str, at: usize) -> Option<(usize, &'a Expr)> {
        let values = self.module.values_of(name, self.scope);
        let before = values[..values.partition_point(|(_, v)| v.span.end <= at)].last();
        let before = before.or(values.first());
        before.copied().filter(|(_, v)| !(v.span.start..v.span.end).contains(&at))
    }

    /// A comparison of a size with zero: `x.numel() == 0`, `len(tokens) == 0`, `x.shape[0] == 0`.
    fn zero_size(&self, parts: &[Expr], operators: &[String]) -> Option<Cause> {
        let [size, Expr { kind: ExprKind::Constant(zero), .. }] = parts else { return None };
        if zero != "0" || !matches!(operators[0].as_str(), "==" | "!=" | ">") {
            return None;
        }
        let path = match &size.kind {
            ExprKind::Call(call) => self.module.names.resolve_called(call),
            _ => size.to_dotted()?,
        };
        let is_size = path.ends_with(".numel") || path.ends_with(".shape") || path.ends_with(".size");
        is_size.then_some(Cause::Size(path))
    }
}

/// Lists what collectives write in each scope, also those that a method such as `group.broadcast` wraps.
pub fn list_agreed(module: &Module<'_>) -> Agreed {
    let of_scope = |scope: &super::module::Scope<'_>| {
        let mut out = BTreeMap::new();
        super::module::visit_expressions(scope.body, &mut |e| {
            let Some(call) = e.as_call() else { return };
            let names = match module.names.find_collective(e) {
                Some(collective) => written_names(&collective, call),
                None if is_agreeing(&module.names.resolve_called(call)) => {
                    call.positional.iter().filter_map(Expr::to_dotted).collect()
                }
                None => return,
            };
            for name in names {
                out.entry(name).or_insert(e.span.start);
            }
        });
        out
    };
    Agreed { scopes: module.scopes.iter().map(of_scope).collect(), steps: Cell::new(0) }
}

/// Returns whether the name of a function says that it makes ranks agree.
fn is_agreeing(path: &str) -> bool {
    let name = path.rsplit('.').next().unwrap_or(path);
    AGREEING.iter().any(|word| name.contains(word))
}

/// Returns the names of what a collective writes.
fn written_names(collective: &Collective, call: &Call) -> Vec<String> {
    let Some(written) = collective.find_written(call) else { return Vec::new() };
    match &written.kind {
        ExprKind::Sequence(parts) => parts.iter().filter_map(Expr::to_dotted).collect(),
        _ => written.to_dotted().into_iter().collect(),
    }
}

fn environment_cause(name: &Expr) -> Option<Cause> {
    let ExprKind::Constant(name) = &name.kind else { return None };
    match name.as_str() {
        "RANK" | "SLURM_PROCID" => Some(Cause::Rank(None)),
        "LOCAL_RANK" | "SLURM_LOCALID" | "GROUP_RANK" | "NODE_RANK" => {
            Some(Cause::Rank(Some("local".to_string())))
        }
        name if DEBUG_WORDS.iter().any(|word| name.to_ascii_uppercase().contains(word)) => {
            Some(Cause::Environment(name.to_string()))
        }
        // A setting of the job is set by its launcher, on all ranks.
        _ => None,
    }
}

/// Returns the axis of a name that usually holds a rank's number, or `Some(None)` for the rank in the job.
fn rank_axis(name: &str) -> Option<Option<String>> {
    let name = name.rsplit('.').next().unwrap_or(name).to_ascii_lowercase();
    match name.as_str() {
        "rank" | "global_rank" | "world_rank" | "my_rank" | "myrank" | "is_main_process" | "is_main"
        | "is_master" | "is_master_process" | "master_process" | "main_process" | "is_rank0"
        | "is_rank_0" | "is_rank_zero" | "is_chief" | "is_global_zero" => return Some(None),
        "is_local_main_process" | "is_local_zero" => return Some(Some("local".to_string())),
        "is_first_stage" | "is_last_stage" => return Some(Some("pp".to_string())),
        _ => {}
    }
    let axis = name.strip_suffix("_rank")?;
    // The rank of a matrix, and the number of another rank, which is the same on all ranks.
    let other = [
        "lora", "low", "max", "min", "matrix", "full", "src", "dst", "root", "peer", "source", "target",
        "adapter",
    ];
    (!other.contains(&axis) && !axis.ends_with("per")).then(|| Some(axis.to_string()))
}

/// Returns the value of a condition on the rank's number for one rank, if it has no other part.
#[must_use]
pub fn evaluate_for_rank(expr: &Expr, rank: i64) -> Option<bool> {
    let number = |e: &Expr| number_for_rank(e, rank);
    match &expr.kind {
        ExprKind::Not(inner) => evaluate_for_rank(inner, rank).map(|b| !b),
        ExprKind::Compare(parts, operators) => {
            let [left, right] = parts.as_slice() else { return None };
            if let ExprKind::Sequence(members) = &right.kind {
                let members: Option<Vec<i64>> = members.iter().map(number).collect();
                let is_in = members?.contains(&number(left)?);
                return match operators[0].split_whitespace().collect::<Vec<_>>()[..] {
                    ["in"] => Some(is_in),
                    ["not", "in"] => Some(!is_in),
                    _ => None,
                };
            }
            let (left, right) = (number(left)?, number(right)?);
            match operators[0].as_str() {
                "==" => Some(left == right),
                "!=" => Some(left != right),
                "<" => Some(left < right),
                "<=" => Some(left <= right),
                ">" => Some(left > right),
                ">=" => Some(left >= right),
                _ => None,
            }
        }
        ExprKind::Name(_) | ExprKind::Attribute(..) | ExprKind::Call(_) => {
            let name = expr.as_call().map_or(expr, |c| &c.function).to_dotted()?;
            rank_axis(&name)?;
            // `if is_main` holds on rank 0, and `if rank` on all others.
            Some(if name.contains("is_") || name.contains("main") { rank == 0 } else { rank != 0 })
        }
        _ => None,
    }
}

/// Returns the number that an expression is for one rank: a constant or the rank itself.
fn number_for_rank(expr: &Expr, rank: i64) -> Option<i64> {
    match &expr.kind {
        ExprKind::Constant(text) => text.parse::<i64>().ok(),
        ExprKind::Call(call) => {
            let path = call.function.to_dotted()?;
            let first = call.positional.first();
            let reads_environment = path.ends_with("getenv") || path.ends_with("environ.get");
            match first.map(|e| &e.kind) {
                _ if path.ends_with("get_rank") => Some(rank),
                Some(ExprKind::Constant(name)) if reads_environment => name.ends_with("RANK").then_some(rank),
                Some(_) if path == "int" => first.and_then(|e| number_for_rank(e, rank)),
                _ => None,
            }
        }
        ExprKind::Subscript(value, index) => match (value.to_dotted()?.as_str(), &index.first()?.kind) {
            ("os.environ", ExprKind::Constant(name)) => name.ends_with("RANK").then_some(rank),
            _ => None,
        },
        _ => rank_axis(&expr.to_dotted()?).map(|_| rank),
    }
}
