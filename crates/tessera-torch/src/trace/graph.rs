//! Reads the collectives of one graph, line by line.

use std::collections::BTreeMap;
use std::rc::Rc;

use tessera_base::named_enum;

use super::collective::{CollectiveCall, ParsedCall, TensorType, parse_call};
use super::records::quote_line;

/// Maximum number of typed names that a graph keeps. A call of a later name has no operand type.
const MAX_NAMES: usize = 1 << 20;
/// Maximum number of collectives of a graph.
const MAX_CALLS: usize = 1 << 18;

named_enum! {
    /// Which part of a training step a graph computes.
    pub enum Direction {
        /// The forward, or inference.
        Forward = "forward",
        /// The backward.
        Backward = "backward",
    }
}

/// The collectives of a graph, in its order.
#[derive(Debug, Clone)]
pub struct Graph {
    /// Part of a step.
    pub direction: Direction,
    /// Collectives.
    pub calls: Vec<CollectiveCall>,
    /// Ops that look like collectives and are unknown, with their number.
    pub unknown: BTreeMap<String, usize>,
    /// Whether the graph has more collectives than the analysis keeps.
    pub is_cut: bool,
}

/// Reads the lines of a graph.
#[derive(Debug)]
pub(crate) struct GraphReader {
    graph: Graph,
    types: BTreeMap<String, TensorType>,
    /// The line that the comment names, and whether it is the user's.
    line: Option<Rc<str>>,
    is_user_line: bool,
    last_user_line: Option<Rc<str>>,
    /// The first collective that has no user's line behind it yet.
    open_from: usize,
}

impl GraphReader {
    pub(crate) fn new(direction: Direction) -> GraphReader {
        GraphReader {
            graph: Graph { direction, calls: Vec::new(), unknown: BTreeMap::new(), is_cut: false },
            types: BTreeMap::new(),
            line: None,
            is_user_line: false,
            last_user_line: None,
            open_from: 0,
        }
    }

    pub(crate) fn finish(self) -> Graph {
        self.graph
    }

    /// Reads one line of the printed module.
    pub(crate) fn push_line(&mut self, line: &str) {
        if let Some(comment) = line.trim_start().strip_prefix('#') {
            // A graph that is split for a backward has `# recompute: MUST_SAVE File: …`.
            if let Some((_, site)) = comment.split_once(" File: ") {
                self.push_site(site);
            }
            return;
        }
        self.collect_types(line);
        if line.contains("tangents_") && line.contains(": \"") && !line.contains(" = ") {
            self.graph.direction = Direction::Backward;
        }
        let Some((_, rest)) = line.split_once("torch.ops.") else { return };
        let Some((path, rest)) = rest.split_once('(') else { return };
        let mut parts = path.split('.');
        let (Some(namespace), Some(op)) = (parts.next(), parts.next()) else { return };
        let types = &self.types;
        let type_of = |name: &str| types.get(name).cloned();
        match parse_call(namespace, op, &split_arguments(rest), &type_of) {
            None | Some(ParsedCall::NoCollective) => {}
            Some(ParsedCall::Unknown(op)) => *self.graph.unknown.entry(op).or_default() += 1,
            Some(ParsedCall::Collective(_)) if self.graph.calls.len() >= MAX_CALLS => {
                self.graph.is_cut = true;
            }
            Some(ParsedCall::Collective(mut call)) => {
                let name = line.trim_start().split([':', ' ']).next().unwrap_or("");
                call.result = type_of(name);
                call.site.line = self.line.clone().filter(|_| self.is_user_line);
                call.site.after.clone_from(&self.last_user_line);
                self.graph.calls.push(*call);
            }
        }
    }

    /// Reads `PATH:LINE in FUNCTION, code: CODE`.
    fn push_site(&mut self, comment: &str) {
        self.is_user_line = is_user_file(comment.split(", code:").next().unwrap_or(comment));
        if self.is_user_line {
            let place: Rc<str> = quote_line(comment.split(", code:").next().unwrap_or(comment)).into();
            for call in &mut self.graph.calls[self.open_from..] {
                call.site.before = Some(place.clone());
            }
            self.open_from = self.graph.calls.len();
            self.last_user_line = Some(place);
        }
        self.line = Some(quote_line(comment).into());
    }

    /// Keeps the type of each `name: "type"` of the line.
    fn collect_types(&mut self, line: &str) {
        let mut rest = line;
        while let Some(at) = rest.find(": \"") {
            let (head, tail) = (&rest[..at], &rest[at + 3..]);
            let Some((text, behind)) = tail.split_once('"') else { return };
            let from = head
                .rfind(|c: char| !c.is_alphanumeric() && c != '_')
                .map_or(0, |i| i + head[i..].chars().next().map_or(1, char::len_utf8));
            let name = &head[from..];
            if let Some(tensor) = TensorType::from_text(text).filter(|_| !name.is_empty())
                && (self.types.len() < MAX_NAMES || self.types.contains_key(name))
            {
                self.types.insert(name.to_string(), tensor);
            }
            rest = behind;
        }
    }
}

/// Returns whether a path is of the user's program and not of PyTorch itself.
pub(crate) fn is_user_file(path: &str) -> bool {
    let is_package = path.contains("site-packages/torch/") || path.contains("dist-packages/torch/");
    !is_package && !path.contains("/torch/distributed/") && !path.contains("/torch/nn/")
}

/// Splits the arguments of a call at its commas, up to the closing parenthesis.
fn split_arguments(text: &str) -> Vec<&str> {
    let (mut out, mut depth, mut start, mut quote) = (Vec::new(), 0i32, 0, None);
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (Some(_), _) => {}
            (None, '\'' | '"') => quote = Some(c),
            (None, '(' | '[' | '{') => depth += 1,
            (None, ')') if depth == 0 => {
                out.push(text[start..at].trim());
                return out;
            }
            (None, ')' | ']' | '}') => depth -= 1,
            (None, ',') if depth == 0 => {
                out.push(text[start..at].trim());
                start = at + 1;
            }
            (None, _) => {}
        }
    }
    out.push(text[start..].trim());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Graph {
        let mut reader = GraphReader::new(Direction::Forward);
        text.lines().for_each(|l| reader.push_line(l));
        reader.finish()
    }

    #[test]
    fn every_functional_op_gives_its_full_signature() {
        let graph = read(
            r#"def forward(self, x: "bf16[8, 4][4, 1]cuda:0", y: "i64[3][1]cuda:0"):
    # File: /home/u/model.py:7 in step, code: a = f(x)
    a: "bf16[8, 4][4, 1]cuda:0" = torch.ops._c10d_functional.all_reduce_.default(x, 'max', '0');  x = None
    b: "bf16[16, 4][4, 1]cuda:0" = torch.ops._c10d_functional.all_gather_into_tensor_out.default(x, 2, '5', out = z)
    c: "bf16[4, 4][4, 1]cuda:0" = torch.ops._c10d_functional.reduce_scatter_tensor.default(x, 'avg', 2, '5')
    d: "i64[3][1]cuda:0" = torch.ops._c10d_functional.all_to_all_single.default(y, [1, 2], [2, 1], '5')
    e: "i64[3][1]cuda:0" = torch.ops._c10d_functional.broadcast.default(y, 3, '0')
    f = torch.ops._c10d_functional.all_reduce_coalesced.default([x, y], 'sum', '0')
    g = torch.ops._c10d_functional.wait_tensor.default(a)"#,
        );
        let shown: Vec<String> = graph.calls.iter().map(|c| format!("{c} in {}", c.group)).collect();
        assert_eq!(
            shown,
            [
                "all_reduce max of bf16[8, 4] (32 elements) in 0",
                "all_gather_into_tensor of bf16[8, 4] (32 elements) over 2 ranks in 5",
                "reduce_scatter_tensor avg of bf16[8, 4] (32 elements) over 2 ranks in 5",
                "all_to_all_single of i64[3] (3 elements) in 5",
                "broadcast of i64[3] (3 elements) from rank 3 in 0",
                "all_reduce_coalesced sum of bf16[8, 4], i64[3] (35 elements) in 0",
            ]
        );
        assert_eq!(graph.calls[0].site.to_string(), "at /home/u/model.py:7 in step, code: a = f(x)");
        assert!(graph.unknown.is_empty());
    }

    #[test]
    fn in_place_ops_are_read_and_unknown_ones_are_counted() {
        let graph = read(
            r#"    def forward(self, x: "f32[8][1]cuda:0", tangents_1: "f32[8][1]cuda:0"):
        r = torch.ops.c10d.allreduce_.default([x], pg, op, None, False, -1)
        s = torch.ops.symm_mem.one_shot_all_reduce.default(x, 'sum', '0')
        t = torch.ops._c10d_functional.isend.default(x, 1, 0, '0')
        u = torch.ops.aten.mm.default(x, x)"#,
        );
        assert_eq!(graph.direction, Direction::Backward);
        assert_eq!(graph.calls[0].to_string(), "all_reduce op of f32[8] (8 elements)");
        assert_eq!(&*graph.calls[0].group, "object pg");
        let unknown: Vec<&str> = graph.unknown.keys().map(String::as_str).collect();
        assert_eq!(unknown, ["_c10d_functional.isend", "symm_mem.one_shot_all_reduce"]);
    }

    #[test]
    fn user_lines_bracket_a_call_whose_own_line_is_of_pytorch() {
        let graph = read(
            "# File: /u/m.py:1 in f, code: a\n# File: /v/site-packages/torch/distributed/_f.py:9 in g, code: b\n\
             x = torch.ops._c10d_functional.all_reduce.default(a, 'sum', '0')\n# File: /u/m.py:2 in f, code: c\n",
        );
        assert_eq!(graph.calls[0].site.to_string(), "between /u/m.py:1 in f and /u/m.py:2 in f");
    }
}
