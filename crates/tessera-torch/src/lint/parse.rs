//! Converts the concrete tree of tree-sitter into the [syntax](super::syntax) that the rules read.
//!
//! tree-sitter finds a tree for any text and needs no recursion for it. The conversion is recursive, so
//! it stops at a depth that Python itself does not reach, and says so.

mod statements;

use tessera_base::{Diagnostic, Span};
use tree_sitter::{Node, Parser, Tree};

use super::syntax::{Call, Expr, ExprKind, Stmt};
use crate::codes::T1430;
use statements::convert_block;

/// Nodes between the file and the deepest part that is read. Python refuses 100 nested blocks and 200
/// nested brackets.
const DEPTH_LIMIT: usize = 400;

/// Errors of syntax that are reported for one file.
const ERROR_LIMIT: usize = 3;

/// A parsed file.
#[derive(Debug)]
pub struct Parsed {
    /// The statements of the module.
    pub body: Vec<Stmt>,
    /// Each comment with its position.
    pub comments: Vec<(Span, String)>,
    /// T1430 for each part that is no Python or that is nested too deeply.
    pub problems: Vec<Diagnostic>,
}

/// Parses the text of a Python file; `name` stands in the diagnostics.
#[must_use]
pub fn parse_python(name: &str, text: &str) -> Parsed {
    let mut parser = Parser::new();
    let tree = match parser.set_language(&tree_sitter_python::LANGUAGE.into()) {
        Ok(()) => parser.parse(text, None),
        Err(_) => None,
    };
    let Some(tree) = tree else {
        let problem = Diagnostic::error(&T1430, format!("{name} cannot be parsed"));
        return Parsed { body: Vec::new(), comments: Vec::new(), problems: vec![problem] };
    };
    let mut converter = Converter { text, too_deep: None };
    let body = convert_block(&mut converter, tree.root_node(), 0);
    let (comments, mut problems) = scan_tree(&tree, name, text);
    if let Some(span) = converter.too_deep {
        let message = format!("{name} is nested deeper than {DEPTH_LIMIT} levels");
        problems.push(Diagnostic::error(&T1430, message).with_span_label(
            name,
            "what is inside was not read",
            span,
        ));
    }
    Parsed { body, comments, problems }
}

/// Collects comments and errors of syntax.
fn scan_tree(tree: &Tree, name: &str, text: &str) -> (Vec<(Span, String)>, Vec<Diagnostic>) {
    let (mut comments, mut errors) = (Vec::new(), Vec::new());
    let mut cursor = tree.walk();
    loop {
        let node = cursor.node();
        let is_error = node.is_error() || node.is_missing();
        if node.kind() == "comment" {
            comments.push((span_of(node), text[node.byte_range()].to_string()));
        } else if is_error && errors.len() < ERROR_LIMIT {
            let found = if node.is_missing() { "something is missing here" } else { "this is no Python" };
            errors.push(
                Diagnostic::error(&T1430, format!("{name} does not parse"))
                    .with_span_label(name, found, first_line_of(node, text))
                    .with_hint("`python -m py_compile` names the mistake; the rest of the file was read"),
            );
        }
        if (!is_error && cursor.goto_first_child()) || cursor.goto_next_sibling() {
            continue;
        }
        loop {
            if !cursor.goto_parent() {
                return (comments, errors);
            }
            if cursor.goto_next_sibling() {
                break;
            }
        }
    }
}

pub(super) fn span_of(node: Node<'_>) -> Span {
    Span { start: node.start_byte(), end: node.end_byte() }
}

/// An error may span half of the file, and its first line is what a person looks for.
fn first_line_of(node: Node<'_>, text: &str) -> Span {
    let span = span_of(node);
    let first = text[span.start..span.end].lines().next().unwrap_or_default();
    Span { start: span.start, end: span.start + first.len() }
}

/// Converts nodes of one text.
pub(super) struct Converter<'t> {
    text: &'t str,
    too_deep: Option<Span>,
}

/// Returns the named children without comments.
pub(super) fn children<'t>(node: Node<'t>) -> Vec<Node<'t>> {
    let mut cursor = node.walk();
    node.named_children(&mut cursor).filter(|n| n.kind() != "comment").collect()
}

impl<'t> Converter<'t> {
    pub(super) fn text_of(&self, node: Node<'_>) -> String {
        self.text[node.byte_range()].to_string()
    }

    /// Returns whether the node is too deep to be read, and remembers the first.
    pub(super) fn is_too_deep(&mut self, node: Node<'_>, depth: usize) -> bool {
        if depth >= DEPTH_LIMIT && self.too_deep.is_none() {
            self.too_deep = Some(first_line_of(node, self.text));
        }
        depth >= DEPTH_LIMIT
    }

    /// Converts the field of a node, if it has it.
    pub(super) fn convert_field(&mut self, node: Node<'t>, field: &str, depth: usize) -> Option<Expr> {
        node.child_by_field_name(field).map(|n| self.convert_expression(n, depth + 1))
    }

    pub(super) fn convert_expressions(&mut self, nodes: Vec<Node<'t>>, depth: usize) -> Vec<Expr> {
        nodes.into_iter().map(|n| self.convert_expression(n, depth + 1)).collect()
    }

    /// Converts an expression. An unknown kind becomes its parts.
    pub(super) fn convert_expression(&mut self, node: Node<'t>, depth: usize) -> Expr {
        let span = span_of(node);
        if self.is_too_deep(node, depth) {
            return Expr { kind: ExprKind::Other(Vec::new()), span };
        }
        let kind = match node.kind() {
            "identifier" => ExprKind::Name(self.text_of(node)),
            "integer" | "float" | "true" | "false" | "none" => ExprKind::Constant(self.text_of(node)),
            "string" => self.convert_string(node, depth),
            "lambda" => ExprKind::Lambda,
            "parenthesized_expression" | "type" | "await" | "expression_list" | "as_pattern_target"
                if node.named_child_count() == 1 =>
            {
                return self
                    .convert_expressions(children(node), depth)
                    .pop()
                    .unwrap_or(Expr { kind: ExprKind::Other(Vec::new()), span });
            }
            "attribute" => match self.convert_field(node, "object", depth) {
                Some(object) => {
                    let name = node.child_by_field_name("attribute").map(|n| self.text_of(n));
                    ExprKind::Attribute(Box::new(object), name.unwrap_or_default())
                }
                None => ExprKind::Other(Vec::new()),
            },
            "call" => self.convert_call(node, depth),
            "comparison_operator" => {
                let mut cursor = node.walk();
                let operators = node.children_by_field_name("operators", &mut cursor);
                let operators = operators.map(|n| self.text_of(n)).collect();
                ExprKind::Compare(self.convert_expressions(children(node), depth), operators)
            }
            "boolean_operator" => ExprKind::Boolean(self.convert_operands(node, depth)),
            "binary_operator" => ExprKind::Other(self.convert_operands(node, depth)),
            "not_operator" => match self.convert_field(node, "argument", depth) {
                Some(argument) => ExprKind::Not(Box::new(argument)),
                None => ExprKind::Other(Vec::new()),
            },
            "conditional_expression" => {
                match <[Expr; 3]>::try_from(self.convert_expressions(children(node), depth)) {
                    Ok([then, condition, otherwise]) => {
                        ExprKind::Choice(Box::new([condition, then, otherwise]))
                    }
                    Err(parts) => ExprKind::Other(parts),
                }
            }
            "subscript" => {
                let mut parts = self.convert_expressions(children(node), depth).into_iter();
                match parts.next() {
                    Some(value) => ExprKind::Subscript(Box::new(value), parts.collect()),
                    None => ExprKind::Other(Vec::new()),
                }
            }
            "unary_operator" => match self.convert_field(node, "argument", depth) {
                Some(Expr { kind: ExprKind::Constant(_), .. }) => ExprKind::Constant(self.text_of(node)),
                argument => ExprKind::Other(argument.into_iter().collect()),
            },
            "list" | "tuple" | "set" | "pattern_list" | "list_pattern" | "tuple_pattern"
            | "expression_list" => ExprKind::Sequence(self.convert_expressions(children(node), depth)),
            _ => ExprKind::Other(self.convert_expressions(children(node), depth)),
        };
        Expr { kind, span }
    }

    /// The contents of a string without parts, or the parts.
    fn convert_string(&mut self, node: Node<'t>, depth: usize) -> ExprKind {
        let parts = children(node);
        if parts.iter().any(|n| n.kind() == "interpolation") {
            return ExprKind::Other(self.convert_expressions(parts, depth));
        }
        let contents = parts.into_iter().filter(|n| n.kind() == "string_content");
        ExprKind::Constant(contents.map(|n| self.text_of(n)).collect())
    }

    /// The operands of operators that associate to the left. A long sum is a deep tree, and no deep
    /// program.
    fn convert_operands(&mut self, node: Node<'t>, depth: usize) -> Vec<Expr> {
        let (mut operands, mut left) = (Vec::new(), node);
        while left.kind() == node.kind() {
            operands.extend(left.child_by_field_name("right").map(|n| self.convert_expression(n, depth + 1)));
            match left.child_by_field_name("left") {
                Some(next) => left = next,
                None => break,
            }
        }
        if left.kind() != node.kind() {
            operands.push(self.convert_expression(left, depth + 1));
        }
        operands.reverse();
        operands
    }

    fn convert_call(&mut self, node: Node<'t>, depth: usize) -> ExprKind {
        let Some(function) = self.convert_field(node, "function", depth) else {
            return ExprKind::Other(Vec::new());
        };
        let mut call = Call { function, positional: Vec::new(), named: Vec::new() };
        let arguments = node.child_by_field_name("arguments");
        let nodes = match arguments {
            Some(list) if list.kind() == "argument_list" => children(list),
            other => other.into_iter().collect(),
        };
        for argument in nodes {
            let name = argument.child_by_field_name("name").filter(|_| argument.kind() == "keyword_argument");
            match (name, argument.child_by_field_name("value")) {
                (Some(name), Some(value)) => {
                    let value = self.convert_expression(value, depth + 1);
                    call.named.push((self.text_of(name), value));
                }
                _ => call.positional.push(self.convert_expression(argument, depth + 1)),
            }
        }
        ExprKind::Call(Box::new(call))
    }
}
