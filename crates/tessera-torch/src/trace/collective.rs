//! A collective of a compiled graph, and what the members of its group must agree on.

use std::rc::Rc;

/// Type of a tensor as a graph prints it: `f32[32, 64][64, 1]cuda:0`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorType {
    /// Dtype in the notation of the graph: `f32`, `bf16`, `i64`.
    pub dtype: String,
    /// Dims as printed: numbers, or symbols such as `s0` in a dynamic graph.
    pub dims: Vec<String>,
}

impl TensorType {
    /// Reads a type, or returns `None` for a value that is no tensor.
    pub(crate) fn from_text(text: &str) -> Option<TensorType> {
        let (dtype, rest) = text.split_once('[')?;
        let (dims, _) = rest.split_once(']')?;
        let is_word = !dtype.is_empty() && dtype.chars().all(|c| c.is_ascii_alphanumeric());
        let dims: Vec<String> =
            dims.split(',').map(|d| d.trim().to_string()).filter(|d| !d.is_empty()).collect();
        is_word.then(|| TensorType { dtype: dtype.to_string(), dims })
    }

    /// Returns the number of elements; `None` if a dim is a symbol.
    #[must_use]
    pub fn count_elements(&self) -> Option<u64> {
        self.dims.iter().try_fold(1u64, |n, d| n.checked_mul(d.parse().ok()?))
    }
}

impl std::fmt::Display for TensorType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}[{}]", self.dtype, self.dims.join(", "))
    }
}

/// Where the program issues a collective. A graph names the innermost line alone, which for a
/// functional collective is one of PyTorch's own; the user's lines around it then bracket the call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CallSite {
    /// The line of the user's program, if the graph names it.
    pub line: Option<Rc<str>>,
    /// The last line of the user's program that the graph names before.
    pub after: Option<Rc<str>>,
    /// The first one that it names behind.
    pub before: Option<Rc<str>>,
}

impl std::fmt::Display for CallSite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.line, &self.after, &self.before) {
            (Some(line), _, _) => write!(f, "at {line}"),
            (None, Some(a), Some(b)) if a == b => write!(f, "within {a}"),
            (None, Some(a), Some(b)) => write!(f, "between {a} and {b}"),
            (None, Some(a), None) => write!(f, "after {a}"),
            (None, None, Some(b)) => write!(f, "before {b}"),
            (None, None, None) => write!(f, "at a line that the graph does not name"),
        }
    }
}

/// A collective of a compiled graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectiveCall {
    /// Op without its in-place and out variants: `all_reduce`.
    pub op: String,
    /// Reduction: `sum`, `max`.
    pub reduction: Option<String>,
    /// Types of the operands that the graph declares.
    pub operands: Vec<TensorType>,
    /// Type of the result, if the graph declares it.
    pub result: Option<TensorType>,
    /// Name of the process group.
    pub group: Rc<str>,
    /// Number of its members, if the op takes it.
    pub group_size: Option<u32>,
    /// Root rank of a broadcast.
    pub root: Option<i64>,
    /// Where the program issues it.
    pub site: CallSite,
}

/// Positions of the arguments of an op.
struct OpForm {
    /// Name without the suffixes of in-place, out and coalesced variants.
    name: &'static str,
    /// The name under which reports show it.
    shown: &'static str,
    operand: usize,
    reduction: Option<usize>,
    size: Option<usize>,
    root: Option<usize>,
    group: usize,
}

const fn op_form(
    name: &'static str,
    shown: &'static str,
    operand: usize,
    [reduction, size, root]: [Option<usize>; 3],
    group: usize,
) -> OpForm {
    OpForm { name, shown, operand, reduction, size, root, group }
}

/// The ops of `torch.distributed._functional_collectives`; the group is its name.
const FUNCTIONAL: &[OpForm] = &[
    op_form("all_reduce", "all_reduce", 0, [Some(1), None, None], 2),
    op_form("all_gather_into_tensor", "all_gather_into_tensor", 0, [None, Some(1), None], 2),
    op_form("reduce_scatter_tensor", "reduce_scatter_tensor", 0, [Some(1), Some(2), None], 3),
    op_form("all_to_all_single", "all_to_all_single", 0, [None, None, None], 3),
    op_form("broadcast", "broadcast", 0, [None, None, Some(1)], 2),
];

/// The ops that `torch.distributed` calls in place; the group is an object.
const IN_PLACE: &[OpForm] = &[
    op_form("allreduce", "all_reduce", 0, [Some(2), None, None], 1),
    op_form("allgather", "all_gather", 1, [None, None, None], 2),
    op_form("_allgather_base", "all_gather_into_tensor", 1, [None, None, None], 2),
    op_form("reduce_scatter", "reduce_scatter", 1, [Some(3), None, None], 2),
    op_form("_reduce_scatter_base", "reduce_scatter_tensor", 1, [Some(3), None, None], 2),
    op_form("alltoall", "all_to_all", 1, [None, None, None], 2),
    op_form("alltoall_base", "all_to_all_single", 1, [None, None, None], 2),
    op_form("broadcast", "broadcast", 0, [None, None, Some(2)], 1),
    op_form("reduce", "reduce", 0, [Some(2), None, Some(3)], 1),
    op_form("gather", "gather", 1, [None, None, Some(3)], 2),
    op_form("scatter", "scatter", 0, [None, None, Some(3)], 2),
    op_form("barrier", "barrier", 0, [None, None, None], 1),
];

/// What a call of `torch.ops` is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ParsedCall {
    /// A collective.
    Collective(Box<CollectiveCall>),
    /// A call of a namespace of collectives that is none, such as `wait_tensor`.
    NoCollective,
    /// A call of a namespace of collectives that the analysis does not know.
    Unknown(String),
}

/// Reads the call of `namespace.op` with these arguments; `None` if the namespace holds no collectives.
pub(crate) fn parse_call(
    namespace: &str,
    op: &str,
    arguments: &[&str],
    type_of: &dyn Fn(&str) -> Option<TensorType>,
) -> Option<ParsedCall> {
    let is_functional =
        matches!(namespace, "_c10d_functional" | "_c10d_functional_autograd" | "c10d_functional");
    if !is_functional && !matches!(namespace, "c10d" | "symm_mem" | "_dtensor") {
        return None;
    }
    if op.starts_with("wait_tensor") || op.starts_with("_wrap_tensor") {
        return Some(ParsedCall::NoCollective);
    }
    let (forms, is_by_name) = if is_functional { (FUNCTIONAL, true) } else { (IN_PLACE, false) };
    let unknown = || Some(ParsedCall::Unknown(format!("{namespace}.{op}")));
    let base = op.trim_end_matches('_').trim_end_matches("_out");
    let single = base.trim_end_matches("_coalesced");
    let known = forms.iter().filter(|_| is_functional || namespace == "c10d");
    let Some(form) = known.into_iter().find(|f| f.name == single) else { return unknown() };
    let Some(group) = arguments.get(form.group) else { return unknown() };
    let name = match (is_by_name, strip_quotes(group)) {
        (true, Some(name)) => name.to_string(),
        _ => format!("object {group}"),
    };
    let coalesced = if single == base { "" } else { "_coalesced" };
    let text = |at: Option<usize>| arguments.get(at?).copied();
    let operands = arguments.get(form.operand).map_or(Vec::new(), |list| {
        let names = list.trim_start_matches('[').trim_end_matches(']');
        names.split(',').filter_map(|name| type_of(name.trim())).collect()
    });
    Some(ParsedCall::Collective(Box::new(CollectiveCall {
        op: format!("{}{coalesced}", form.shown),
        reduction: text(form.reduction).map(|r| strip_quotes(r).unwrap_or(r).to_string()),
        operands,
        result: None,
        group: name.into(),
        group_size: text(form.size).and_then(|s| s.parse().ok()),
        root: text(form.root).and_then(|s| s.parse().ok()),
        site: CallSite::default(),
    })))
}

fn strip_quotes(text: &str) -> Option<&str> {
    let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    text.strip_prefix(quote)?.strip_suffix(quote)
}

impl CollectiveCall {
    /// Returns the property in which two calls of one position differ, or `None` if they match. Like
    /// NCCL it compares the number of elements and not the shape, and it does not compare the sizes of
    /// an all-to-all, which differ between ranks. Sizes of dynamic graphs match any size.
    #[must_use]
    pub fn find_difference(&self, other: &CollectiveCall) -> Option<&'static str> {
        let differ = |a: Option<i64>, b: Option<i64>| matches!((a, b), (Some(a), Some(b)) if a != b);
        if self.op != other.op {
            return Some("op");
        }
        if self.reduction != other.reduction {
            return Some("reduction");
        }
        if differ(self.group_size.map(i64::from), other.group_size.map(i64::from)) {
            return Some("group size");
        }
        if differ(self.root, other.root) {
            return Some("root");
        }
        match (self.declared_types(), other.declared_types()) {
            ((true, a), (true, b)) | ((false, a), (false, b)) => self.find_type_difference(&a, &b),
            // The one graph declares the operand and the other the result: only dtypes compare.
            ((_, a), (_, b)) => has_other_dtype(&a, &b).then_some("dtype"),
        }
    }

    fn find_type_difference(&self, a: &[&TensorType], b: &[&TensorType]) -> Option<&'static str> {
        if has_other_dtype(a, b) {
            return Some("dtype");
        }
        let count = |types: &[&TensorType]| -> Option<u64> {
            types.iter().try_fold(0u64, |n, t| n.checked_add(t.count_elements()?))
        };
        let is_ragged = self.op.starts_with("all_to_all");
        let sizes = count(a).zip(count(b)).filter(|_| !is_ragged && !a.is_empty() && !b.is_empty());
        sizes.filter(|(a, b)| a != b).map(|_| "number of elements")
    }

    /// Returns the types of the operands, or else that of the result, and whether they are operands.
    fn declared_types(&self) -> (bool, Vec<&TensorType>) {
        match self.operands.is_empty() {
            false => (true, self.operands.iter().collect()),
            true => (false, self.result.iter().collect()),
        }
    }
}

fn has_other_dtype(a: &[&TensorType], b: &[&TensorType]) -> bool {
    a.iter().zip(b).any(|(a, b)| a.dtype != b.dtype)
}

impl std::fmt::Display for CollectiveCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.op)?;
        if let Some(reduction) = &self.reduction {
            write!(f, " {reduction}")?;
        }
        let (is_operand, types) = self.declared_types();
        let shown: Vec<String> = types.iter().take(3).map(ToString::to_string).collect();
        if !shown.is_empty() {
            let more = if types.len() > 3 { ", …" } else { "" };
            write!(f, " {} {}{more}", if is_operand { "of" } else { "to" }, shown.join(", "))?;
        }
        let elements = types.iter().try_fold(0u64, |n, t| n.checked_add(t.count_elements()?));
        if let Some(elements) = elements.filter(|_| !types.is_empty()) {
            write!(f, " ({elements} elements)")?;
        }
        if let Some(size) = self.group_size {
            write!(f, " over {size} ranks")?;
        }
        self.root.map_or(Ok(()), |root| write!(f, " from rank {root}"))
    }
}
