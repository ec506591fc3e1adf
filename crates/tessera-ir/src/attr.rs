//! Values of attributes as the text states them; [`crate::attr_kind`] gives them types.

use std::collections::BTreeMap;

/// Value of an op's attribute, fixed at compile time.
#[derive(Debug, Clone)]
pub enum Attr {
    /// An integer, such as the `root` of a broadcast.
    Int(i64),
    /// A floating-point number, compared by its bits.
    Float(f64),
    /// A string, such as the `axis` of a collective.
    Str(String),
    /// A list of integers, such as the `grid` of `rope`.
    Ints(Vec<i64>),
    /// A boolean, such as `transposed` of `bmm`.
    Bool(bool),
}

impl PartialEq for Attr {
    fn eq(&self, other: &Attr) -> bool {
        match (self, other) {
            (Attr::Int(a), Attr::Int(b)) => a == b,
            (Attr::Float(a), Attr::Float(b)) => a.to_bits() == b.to_bits(),
            (Attr::Str(a), Attr::Str(b)) => a == b,
            (Attr::Ints(a), Attr::Ints(b)) => a == b,
            (Attr::Bool(a), Attr::Bool(b)) => a == b,
            _ => false,
        }
    }
}
impl Eq for Attr {}

/// Attributes of an op, sorted by name.
pub type Attrs = BTreeMap<String, Attr>;

pub(crate) fn format_attr(a: &Attr) -> String {
    match a {
        Attr::Int(i) => i.to_string(),
        Attr::Float(x) => format_float(*x),
        Attr::Str(s) => quote_string(s),
        Attr::Ints(v) => format!("[{}]", v.iter().map(i64::to_string).collect::<Vec<_>>().join(", ")),
        Attr::Bool(b) => b.to_string(),
    }
}

pub(crate) fn quote_string(s: &str) -> String {
    let mut out = String::from("\"");
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            c => out.push(c),
        }
    }
    out + "\""
}

/// Formats a float as the shortest decimal that parses to the same bits, always with a point or an
/// exponent. Values without a decimal form are written as their bits.
fn format_float(x: f64) -> String {
    if x.is_finite() { format!("{x:?}") } else { format!("f64:{:#018x}", x.to_bits()) }
}
