//! Resolves names through imports, and knows which functions of PyTorch are collectives.

use std::collections::BTreeMap;

use super::syntax::{Call, Expr, ExprKind, Stmt, StmtKind};

/// How a collective is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `torch.distributed.all_reduce`: writes into a tensor that it is given.
    InPlace,
    /// `torch.distributed._functional_collectives`: returns a tensor that waits for itself.
    Functional,
    /// `torch.ops._c10d_functional`: returns a tensor that `wait_tensor` must be called on.
    RawFunctional,
    /// Creation of a group, collectives of Python objects, barriers, and the differentiable ones.
    Other,
}

/// A function that all members of a group must call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collective {
    /// Its name without the module.
    pub name: String,
    /// How it is called.
    pub form: Form,
}

const IN_PLACE: &[&str] = &[
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_into_tensor",
    "_all_gather_base",
    "all_gather_coalesced",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
];

const OTHER: &[&str] = &[
    "barrier",
    "monitored_barrier",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "init_device_mesh",
];

const FUNCTIONAL: &[&str] = &[
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_gather_tensor",
    "all_gather_single",
    "all_gather_tensor_autograd",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "broadcast",
    "permute_tensor",
];

impl Collective {
    /// Returns the collective that a resolved path names.
    #[must_use]
    pub fn from_path(path: &str) -> Option<Collective> {
        let path = path.strip_suffix(".default").unwrap_or(path);
        let (module, name) = path.rsplit_once('.')?;
        let form = match module {
            "torch.distributed" | "torch.distributed.distributed_c10d" => match name {
                _ if IN_PLACE.contains(&name) => Form::InPlace,
                _ if OTHER.contains(&name) => Form::Other,
                _ => return None,
            },
            "torch.distributed.device_mesh" if name == "init_device_mesh" => Form::Other,
            "torch.distributed.nn" | "torch.distributed.nn.functional" if IN_PLACE.contains(&name) => {
                Form::Other
            }
            "torch.distributed._functional_collectives" if FUNCTIONAL.contains(&name) => Form::Functional,
            "torch.ops._c10d_functional" | "torch.ops.c10d_functional" if FUNCTIONAL.contains(&name) => {
                Form::RawFunctional
            }
            _ => return None,
        };
        Some(Collective { name: name.to_string(), form })
    }

    /// Returns the argument that an in-place collective writes, and that nobody may touch before its wait.
    #[must_use]
    pub fn find_written<'a>(&self, call: &'a Call) -> Option<&'a Expr> {
        if self.form != Form::InPlace && !self.name.contains("object") {
            return None;
        }
        let names = ["tensor", "tensor_list", "output_tensor", "output", "output_tensor_list", "object_list"];
        names
            .iter()
            .find_map(|n| call.named.iter().find(|(name, _)| name == n).map(|(_, e)| e))
            .or_else(|| call.positional.first())
    }

    /// Returns the group of a call as its text, if it names one.
    #[must_use]
    pub fn find_group<'a>(&self, call: &'a Call) -> Option<&'a Expr> {
        let named = call.named.iter().find(|(name, _)| name == "group" || name == "process_group");
        let position = match self.form {
            Form::Functional | Form::RawFunctional => Some(call.positional.len().saturating_sub(1)),
            _ => None,
        };
        named
            .map(|(_, e)| e)
            .or_else(|| position.filter(|p| *p > 0).and_then(|p| call.positional.get(p)))
            .filter(|e| !matches!(&e.kind, ExprKind::Constant(text) if text == "None"))
    }
}

/// What names of a file stand for.
#[derive(Debug, Default)]
pub struct Names {
    paths: BTreeMap<String, String>,
    star_imports: Vec<String>,
}

impl Names {
    /// Reads imports and plain aliases such as `funcol = torch.distributed._functional_collectives`, wherever
    /// they stand in the file.
    #[must_use]
    pub fn from_block(body: &[Stmt]) -> Names {
        let mut names = Names::default();
        names.collect_names(body);
        names
    }

    fn collect_names(&mut self, block: &[Stmt]) {
        for statement in block {
            match &statement.kind {
                StmtKind::Import(imports) => {
                    for import in imports {
                        if import.name == "*" {
                            self.star_imports.push(import.path.clone());
                        } else {
                            self.paths.insert(import.name.clone(), import.path.clone());
                        }
                    }
                }
                StmtKind::Assign(targets, value) => {
                    if let ([Expr { kind: ExprKind::Name(name), .. }], Some(path)) =
                        (targets.as_slice(), self.resolve(value))
                        && path.starts_with("torch.")
                        && matches!(value.kind, ExprKind::Attribute(..))
                    {
                        self.paths.insert(name.clone(), path);
                    }
                }
                StmtKind::Function(f) => self.collect_names(&f.body),
                StmtKind::Class(c) => self.collect_names(&c.body),
                _ => {}
            }
            for inner in statement.list_blocks() {
                self.collect_names(inner);
            }
        }
    }

    /// Returns the path of a name or attribute, with imports resolved.
    #[must_use]
    pub fn resolve(&self, expr: &Expr) -> Option<String> {
        match &expr.kind {
            ExprKind::Name(name) => {
                let starred = || {
                    let paths = self.star_imports.iter().map(|module| format!("{module}{name}"));
                    paths.into_iter().find(|path| Collective::from_path(path).is_some())
                };
                Some(self.paths.get(name).cloned().or_else(starred).unwrap_or_else(|| name.clone()))
            }
            ExprKind::Attribute(value, name) => Some(format!("{}.{name}", self.resolve(value)?)),
            _ => None,
        }
    }

    /// Returns the path of what a call calls.
    #[must_use]
    pub fn resolve_called(&self, call: &Call) -> String {
        self.resolve(&call.function).unwrap_or_default()
    }

    /// Returns the collective that an expression calls.
    #[must_use]
    pub fn find_collective(&self, expr: &Expr) -> Option<Collective> {
        Collective::from_path(&self.resolve_called(expr.as_call()?))
    }

    /// Returns whether the expression is the condition that only compiled code satisfies, as true for
    /// `is_compiling()` and false for its negation.
    #[must_use]
    pub fn tests_compiling(&self, expr: &Expr) -> Option<bool> {
        match &expr.kind {
            ExprKind::Not(inner) => self.tests_compiling(inner).map(|b| !b),
            ExprKind::Call(call) => match self.resolve_called(call).rsplit_once('.') {
                Some((module, "is_compiling" | "is_dynamo_compiling")) => {
                    module.starts_with("torch").then_some(true)
                }
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns whether the function with these decorators is kept out of compiled code.
    #[must_use]
    pub fn is_compile_disabled(&self, decorators: &[Expr]) -> bool {
        decorators.iter().any(|d| {
            let path =
                d.as_call().map_or_else(|| self.resolve(d).unwrap_or_default(), |c| self.resolve_called(c));
            matches!(
                path.as_str(),
                "torch.compiler.disable"
                    | "torch._dynamo.disable"
                    | "torch._dynamo.disallow_in_graph"
                    | "torch.compiler.allow_in_graph"
            )
        })
    }

    /// Returns whether the expression is `torch.compile`, with or without options.
    #[must_use]
    pub fn is_compile(&self, expr: &Expr) -> bool {
        match expr.as_call() {
            None => self.resolve(expr).as_deref() == Some("torch.compile"),
            Some(call) => {
                let path = self.resolve_called(call);
                path == "torch.compile"
                    || (path == "functools.partial"
                        && call.positional.first().is_some_and(|f| self.is_compile(f)))
            }
        }
    }
}
