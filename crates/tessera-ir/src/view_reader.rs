//! Reads the fields of a view from an op: the kinds of operands, and the error of an op that has no view.

use crate::attr::{Attr, Attrs, format_attr};
use crate::attr_kind::AttrKind;
use crate::ids::ValueId;

/// Reason why an op has no view: an operand is missing, or an attribute is missing or invalid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ViewError {
    /// Name of the op that has no view.
    pub op_name: &'static str,
    /// Message that names the operand or attribute and what it must be.
    pub message: String,
}

impl std::fmt::Display for ViewError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.op_name, self.message)
    }
}

impl std::error::Error for ViewError {}

/// A kind of operand.
pub trait OperandKind {
    /// Type of the operand in a view.
    type Value;
    /// Whether an op may omit the operand.
    const OPTIONAL: bool;
    /// Whether the operand is a vector or a table that applies to the rows of the first operand.
    const IS_VECTOR: bool;

    /// Converts an operand; `None` if it is missing and the op needs it.
    fn from_operand(operand: Option<ValueId>) -> Option<Self::Value>;
}

macro_rules! operand_kinds {
    ($($(#[$doc:meta])* $kind:ident: $value:ty, $optional:literal, $vector:literal, $convert:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $kind;

        impl OperandKind for $kind {
            type Value = $value;
            const OPTIONAL: bool = $optional;
            const IS_VECTOR: bool = $vector;

            fn from_operand(operand: Option<ValueId>) -> Option<$value> {
                let convert: fn(Option<ValueId>) -> Option<$value> = $convert;
                convert(operand)
            }
        }
    )*};
}

operand_kinds! {
    /// An operand that the op needs.
    Operand: ValueId, false, false, |v| v;
    /// An operand that an op may omit.
    OptOperand: Option<ValueId>, true, false, Some;
    /// A vector or a table that applies to the rows of the first operand.
    Vector: ValueId, false, true, |v| v;
    /// A vector or a table that an op may omit.
    OptVector: Option<ValueId>, true, true, Some;
}

/// The parts of an op that a view holds, read in the order of the op table.
#[derive(Debug)]
pub struct ViewReader<'a> {
    pub(crate) op_name: &'static str,
    /// Positional operands that no field has read yet.
    pub(crate) operands: &'a [ValueId],
    pub(crate) keyed: &'a [(&'static str, ValueId)],
    pub(crate) attrs: &'a Attrs,
}

impl ViewReader<'_> {
    pub(crate) fn read_operand<K: OperandKind>(&mut self, name: &str) -> Result<K::Value, ViewError> {
        let operand = self.operands.split_off_first().copied();
        K::from_operand(operand).ok_or_else(|| self.error(format!("operand `{name}` is missing")))
    }

    pub(crate) fn read_keyed<K: OperandKind>(&self, name: &str) -> Result<K::Value, ViewError> {
        let operand = self.keyed.iter().find(|(key, _)| *key == name).map(|(_, v)| *v);
        K::from_operand(operand).ok_or_else(|| self.error(format!("operand `{name}=%…` is missing")))
    }

    pub(crate) fn read_attr<K: AttrKind>(&self, name: &str) -> Result<K::Value, ViewError> {
        match self.attrs.get(name) {
            None => K::omitted().ok_or_else(|| self.error(format!("attribute `{name}` is missing"))),
            Some(attr) => K::parse(attr).ok_or_else(|| self.error(invalid_attr(name, attr, K::EXPECTED))),
        }
    }

    fn error(&self, message: String) -> ViewError {
        ViewError { op_name: self.op_name, message }
    }
}

/// Returns the message for an attribute that its kind does not accept.
pub(crate) fn invalid_attr(name: &str, attr: &Attr, expected: &str) -> String {
    format!("`{name}` is {}, but must be {expected}", format_attr(attr))
}
