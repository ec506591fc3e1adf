//! The part of Python's syntax that the rules look at, as owned trees of limited depth.

use tessera_base::Span;

/// An expression with its position in the file.
#[derive(Debug, Clone, PartialEq)]
pub struct Expr {
    /// What it is.
    pub kind: ExprKind,
    /// Its bytes in the file.
    pub span: Span,
}

/// The kinds of expressions.
#[derive(Debug, Clone, PartialEq)]
pub enum ExprKind {
    /// A name.
    Name(String),
    /// An attribute of a value: `value.name`.
    Attribute(Box<Expr>, String),
    /// A call.
    Call(Box<Call>),
    /// A number, `True`, `False`, `None` or the contents of a string, as written.
    Constant(String),
    /// A chain of comparisons. There is one operator fewer than operands.
    Compare(Vec<Expr>, Vec<String>),
    /// `and` or `or`. What comes after the first operand is evaluated under its value.
    Boolean(Vec<Expr>),
    /// `not`.
    Not(Box<Expr>),
    /// `then if condition else otherwise`, in the order condition, then, otherwise.
    Choice(Box<[Expr; 3]>),
    /// `value[index]`.
    Subscript(Box<Expr>, Vec<Expr>),
    /// A list, tuple or set.
    Sequence(Vec<Expr>),
    /// A function without a name. Its body does not run where it stands.
    Lambda,
    /// Anything else, with its parts in the order of the text.
    Other(Vec<Expr>),
}

/// A call with its arguments in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// What is called.
    pub function: Expr,
    /// Arguments by position.
    pub positional: Vec<Expr>,
    /// Arguments by name.
    pub named: Vec<(String, Expr)>,
}

impl Call {
    /// Returns the argument with this name, or the one at this position.
    #[must_use]
    pub fn find_argument(&self, name: &str, position: usize) -> Option<&Expr> {
        self.named.iter().find(|(n, _)| n == name).map(|(_, e)| e).or_else(|| self.positional.get(position))
    }
}

impl Expr {
    /// Returns the parts of this expression that are evaluated where it stands, in order.
    #[must_use]
    pub fn list_parts(&self) -> Vec<&Expr> {
        match &self.kind {
            ExprKind::Name(_) | ExprKind::Constant(_) | ExprKind::Lambda => Vec::new(),
            ExprKind::Attribute(value, _) | ExprKind::Not(value) => vec![value],
            ExprKind::Call(call) => std::iter::once(&call.function)
                .chain(&call.positional)
                .chain(call.named.iter().map(|(_, e)| e))
                .collect(),
            ExprKind::Compare(parts, _)
            | ExprKind::Boolean(parts)
            | ExprKind::Sequence(parts)
            | ExprKind::Other(parts) => parts.iter().collect(),
            ExprKind::Choice(parts) => parts.iter().collect(),
            ExprKind::Subscript(value, index) => std::iter::once(&**value).chain(index).collect(),
        }
    }

    /// Visits this expression and all its parts, a call after its arguments.
    pub fn visit<'a>(&'a self, see: &mut dyn FnMut(&'a Expr)) {
        for part in self.list_parts() {
            part.visit(see);
        }
        see(self);
    }

    /// Returns whether this expression or a part of it satisfies the test.
    pub fn contains(&self, test: &dyn Fn(&Expr) -> bool) -> bool {
        test(self) || self.list_parts().iter().any(|p| p.contains(test))
    }

    /// Returns the call, if this is one.
    #[must_use]
    pub fn as_call(&self) -> Option<&Call> {
        if let ExprKind::Call(call) = &self.kind { Some(call) } else { None }
    }

    /// Returns names and attributes joined by dots: `self.group`. A subscript counts as the value that
    /// it is taken from, so that `parts[0]` is `parts`.
    #[must_use]
    pub fn to_dotted(&self) -> Option<String> {
        match &self.kind {
            ExprKind::Name(name) => Some(name.clone()),
            ExprKind::Attribute(value, name) => Some(format!("{}.{name}", value.to_dotted()?)),
            ExprKind::Subscript(value, _) => value.to_dotted(),
            _ => None,
        }
    }
}

/// A statement with its position in the file.
#[derive(Debug, Clone, PartialEq)]
pub struct Stmt {
    /// What it is.
    pub kind: StmtKind,
    /// Its bytes in the file.
    pub span: Span,
}

/// The kinds of statements.
#[derive(Debug, Clone, PartialEq)]
pub enum StmtKind {
    /// An expression whose value is dropped.
    Expr(Expr),
    /// An assignment to one target or several. An augmented one reads its target in the value.
    Assign(Vec<Expr>, Expr),
    /// `return`.
    Return(Option<Expr>),
    /// `raise`.
    Raise(Vec<Expr>),
    /// `continue`.
    Continue,
    /// `break`.
    Break,
    /// `if` with each `elif`, and the block of `else`.
    If(Vec<(Expr, Vec<Stmt>)>, Vec<Stmt>),
    /// `for target in iterable`, the body, and the block of `else`.
    For(Expr, Expr, Vec<Stmt>, Vec<Stmt>),
    /// `while condition`, the body, and the block of `else`.
    While(Expr, Vec<Stmt>, Vec<Stmt>),
    /// `try`: body, handlers, and the blocks of `else` and `finally` as one.
    Try(Vec<Stmt>, Vec<Handler>, Vec<Stmt>),
    /// `with`.
    With(Vec<Expr>, Vec<Stmt>),
    /// `match` with the block of each case.
    Match(Expr, Vec<Vec<Stmt>>),
    /// A function.
    Function(Box<Function>),
    /// A class.
    Class(Box<Class>),
    /// Names that an import binds.
    Import(Vec<Import>),
    /// Names that `global` or `nonlocal` makes assignable.
    Global(Vec<String>),
    /// Anything else, with its expressions.
    Other(Vec<Expr>),
}

/// An exception handler.
#[derive(Debug, Clone, PartialEq)]
pub struct Handler {
    /// The exceptions that it handles; empty for a bare `except`.
    pub exceptions: Vec<Expr>,
    /// Its block.
    pub body: Vec<Stmt>,
    /// Its bytes in the file.
    pub span: Span,
}

/// A name that an import binds; the name `*` stands for all names of the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Import {
    /// What the name stands for: `torch.distributed.all_reduce`.
    pub path: String,
    /// The name in this file.
    pub name: String,
}

/// A function definition.
#[derive(Debug, Clone, PartialEq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// The parameters with their annotations.
    pub parameters: Vec<(String, Option<Expr>)>,
    /// Decorators without the `@`.
    pub decorators: Vec<Expr>,
    /// Its block.
    pub body: Vec<Stmt>,
}

/// A class definition.
#[derive(Debug, Clone, PartialEq)]
pub struct Class {
    /// Its name.
    pub name: String,
    /// Its bases.
    pub bases: Vec<Expr>,
    /// Its block.
    pub body: Vec<Stmt>,
}

impl Stmt {
    /// Returns the expressions that this statement evaluates before any of its blocks.
    #[must_use]
    pub fn list_expressions(&self) -> Vec<&Expr> {
        match &self.kind {
            StmtKind::Expr(e) => vec![e],
            StmtKind::Assign(targets, value) => std::iter::once(value).chain(targets).collect(),
            StmtKind::Return(value) => value.iter().collect(),
            StmtKind::Raise(parts) | StmtKind::Other(parts) | StmtKind::With(parts, _) => {
                parts.iter().collect()
            }
            StmtKind::If(arms, _) => arms.iter().map(|(condition, _)| condition).collect(),
            StmtKind::For(_, iterable, ..) => vec![iterable],
            StmtKind::While(condition, ..) => vec![condition],
            StmtKind::Match(subject, _) => vec![subject],
            _ => Vec::new(),
        }
    }

    /// Returns the blocks of this statement that belong to the same function, in the order of the text.
    #[must_use]
    pub fn list_blocks(&self) -> Vec<&[Stmt]> {
        match &self.kind {
            StmtKind::If(arms, otherwise) => {
                arms.iter().map(|(_, b)| b.as_slice()).chain([otherwise.as_slice()]).collect()
            }
            StmtKind::For(_, _, body, otherwise) | StmtKind::While(_, body, otherwise) => {
                vec![body, otherwise]
            }
            StmtKind::Try(body, handlers, rest) => std::iter::once(body.as_slice())
                .chain(handlers.iter().map(|h| h.body.as_slice()))
                .chain([rest.as_slice()])
                .collect(),
            StmtKind::With(_, body) => vec![body],
            StmtKind::Match(_, cases) => cases.iter().map(Vec::as_slice).collect(),
            _ => Vec::new(),
        }
    }
}

/// Visits the statements of a block and of the blocks inside it, without those of inner functions and classes.
pub fn visit_statements<'a>(block: &'a [Stmt], see: &mut dyn FnMut(&'a Stmt)) {
    for statement in block {
        see(statement);
        for inner in statement.list_blocks() {
            visit_statements(inner, see);
        }
    }
}
