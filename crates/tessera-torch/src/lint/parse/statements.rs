//! Converts the statements of tree-sitter's tree.

use tree_sitter::Node;

use super::{Converter, children, span_of};
use crate::lint::syntax::{Class, Expr, ExprKind, Function, Handler, Import, Stmt, StmtKind};

/// Converts the statements of a block, or of the module.
pub(super) fn convert_block<'t>(converter: &mut Converter<'t>, block: Node<'t>, depth: usize) -> Vec<Stmt> {
    children(block).into_iter().filter_map(|n| convert_statement(converter, n, depth + 1)).collect()
}

fn convert_statement<'t>(c: &mut Converter<'t>, node: Node<'t>, depth: usize) -> Option<Stmt> {
    if c.is_too_deep(node, depth) {
        return None;
    }
    let kind = match node.kind() {
        "expression_statement" => convert_expression_statement(c, node, depth),
        "return_statement" => StmtKind::Return(c.convert_expressions(children(node), depth).pop()),
        "raise_statement" => StmtKind::Raise(c.convert_expressions(children(node), depth)),
        "continue_statement" => StmtKind::Continue,
        "break_statement" => StmtKind::Break,
        "if_statement" => convert_if(c, node, depth),
        "for_statement" => {
            let (target, iterable) =
                (c.convert_field(node, "left", depth)?, c.convert_field(node, "right", depth)?);
            let body = field_block(c, node, "body", depth);
            StmtKind::For(target, iterable, body, field_block(c, node, "alternative", depth))
        }
        "while_statement" => {
            let condition = c.convert_field(node, "condition", depth)?;
            let body = field_block(c, node, "body", depth);
            StmtKind::While(condition, body, field_block(c, node, "alternative", depth))
        }
        "try_statement" => convert_try(c, node, depth),
        "with_statement" => {
            let clauses = children(node).into_iter().filter(|n| n.kind() == "with_clause");
            let items: Vec<Node<'t>> = clauses.flat_map(children).collect();
            let items = c.convert_expressions(items, depth);
            StmtKind::With(items, field_block(c, node, "body", depth))
        }
        "match_statement" => {
            let subject = c.convert_field(node, "subject", depth)?;
            let body = node.child_by_field_name("body").into_iter().flat_map(children);
            let cases = body.map(|n| field_block(c, n, "consequence", depth + 1)).collect();
            StmtKind::Match(subject, cases)
        }
        "decorated_definition" => {
            let decorators = children(node).into_iter().filter(|n| n.kind() == "decorator");
            let decorators: Vec<Node<'t>> = decorators.flat_map(children).collect();
            let decorators = c.convert_expressions(decorators, depth);
            let definition = node.child_by_field_name("definition")?;
            return convert_definition(c, definition, decorators, depth + 1);
        }
        "function_definition" | "class_definition" => {
            return convert_definition(c, node, Vec::new(), depth);
        }
        "import_statement" | "import_from_statement" => StmtKind::Import(convert_import(c, node)),
        "global_statement" | "nonlocal_statement" => {
            StmtKind::Global(children(node).into_iter().map(|n| c.text_of(n)).collect())
        }
        "print_statement" => {
            let function = Expr { kind: ExprKind::Name("print".to_string()), span: span_of(node) };
            let positional = c.convert_expressions(children(node), depth);
            let call = crate::lint::syntax::Call { function, positional, named: Vec::new() };
            StmtKind::Expr(Expr { kind: ExprKind::Call(Box::new(call)), span: span_of(node) })
        }
        _ => StmtKind::Other(c.convert_expressions(children(node), depth)),
    };
    Some(Stmt { kind, span: span_of(node) })
}

/// An assignment `a = b = value` is an assignment on the right of another.
fn convert_expression_statement<'t>(c: &mut Converter<'t>, node: Node<'t>, depth: usize) -> StmtKind {
    let inner = children(node);
    let [first] = inner[..] else { return StmtKind::Other(c.convert_expressions(inner, depth)) };
    let (mut targets, mut at) = (Vec::new(), first);
    while at.kind() == "assignment" {
        targets.extend(c.convert_field(at, "left", depth));
        match at.child_by_field_name("right") {
            Some(right) => at = right,
            None => return StmtKind::Other(Vec::new()),
        }
    }
    if first.kind() == "augmented_assignment" {
        targets.extend(c.convert_field(first, "left", depth));
        let value = Expr {
            kind: ExprKind::Other(c.convert_expressions(children(first), depth)),
            span: span_of(first),
        };
        return StmtKind::Assign(targets, value);
    }
    let value = c.convert_expression(at, depth + 1);
    if targets.is_empty() { StmtKind::Expr(value) } else { StmtKind::Assign(targets, value) }
}

fn convert_if<'t>(c: &mut Converter<'t>, node: Node<'t>, depth: usize) -> StmtKind {
    let (mut arms, mut otherwise) = (Vec::new(), Vec::new());
    let mut cursor = node.walk();
    let alternatives: Vec<Node<'t>> = node.children_by_field_name("alternative", &mut cursor).collect();
    for clause in std::iter::once(node).chain(alternatives) {
        match c.convert_field(clause, "condition", depth) {
            Some(condition) => arms.push((condition, field_block(c, clause, "consequence", depth))),
            None => otherwise = field_block(c, clause, "body", depth),
        }
    }
    StmtKind::If(arms, otherwise)
}

fn convert_try<'t>(c: &mut Converter<'t>, node: Node<'t>, depth: usize) -> StmtKind {
    let body = field_block(c, node, "body", depth);
    let (mut handlers, mut rest) = (Vec::new(), Vec::new());
    for clause in children(node) {
        let parts = children(clause);
        let block = parts.iter().copied().find(|n| n.kind() == "block");
        let body = block.map(|b| convert_block(c, b, depth + 1)).unwrap_or_default();
        match clause.kind() {
            "except_clause" | "except_group_clause" => {
                let exceptions = parts.into_iter().filter(|n| n.kind() != "block").collect();
                let exceptions = c.convert_expressions(exceptions, depth);
                handlers.push(Handler { exceptions, body, span: span_of(clause) });
            }
            "else_clause" | "finally_clause" => rest.extend(body),
            _ => {}
        }
    }
    StmtKind::Try(body, handlers, rest)
}

/// Converts the block in a field, or the block of the clause in that field.
fn field_block<'t>(c: &mut Converter<'t>, node: Node<'t>, field: &str, depth: usize) -> Vec<Stmt> {
    let Some(mut block) = node.child_by_field_name(field) else { return Vec::new() };
    if let Some(inner) = block.child_by_field_name("body") {
        block = inner;
    }
    convert_block(c, block, depth + 1)
}

fn convert_definition<'t>(
    c: &mut Converter<'t>,
    node: Node<'t>,
    decorators: Vec<Expr>,
    depth: usize,
) -> Option<Stmt> {
    let name = c.text_of(node.child_by_field_name("name")?);
    let body = field_block(c, node, "body", depth);
    let kind = if node.kind() == "class_definition" {
        let bases = node.child_by_field_name("superclasses").map(children).unwrap_or_default();
        StmtKind::Class(Box::new(Class { name, bases: c.convert_expressions(bases, depth), body }))
    } else {
        let parameters = node.child_by_field_name("parameters").map(children).unwrap_or_default();
        let parameters = parameters
            .into_iter()
            .filter_map(|p| {
                let annotation = c.convert_field(p, "type", depth);
                let named = p.child_by_field_name("name").or_else(|| p.named_child(0)).unwrap_or(p);
                (named.kind() == "identifier").then(|| (c.text_of(named), annotation))
            })
            .collect();
        StmtKind::Function(Box::new(Function { name, parameters, decorators, body }))
    };
    Some(Stmt { kind, span: span_of(node) })
}

fn convert_import(c: &Converter<'_>, node: Node<'_>) -> Vec<Import> {
    let module = node.child_by_field_name("module_name");
    let prefix = module.map(|n| c.text_of(n) + ".").unwrap_or_default();
    let mut out = Vec::new();
    for part in children(node).into_iter().filter(|n| Some(*n) != module) {
        let path = part.child_by_field_name("name").unwrap_or(part);
        let alias = part.child_by_field_name("alias").map(|n| c.text_of(n));
        let path = c.text_of(path);
        out.push(match (module, alias) {
            _ if part.kind() == "wildcard_import" => Import { path: prefix.clone(), name: "*".to_string() },
            // `import torch.distributed` binds `torch`.
            (None, None) => {
                let root = path.split('.').next().unwrap_or_default().to_string();
                Import { path: root.clone(), name: root }
            }
            (_, alias) => {
                Import { name: alias.unwrap_or_else(|| path.clone()), path: prefix.clone() + &path }
            }
        });
    }
    out
}
