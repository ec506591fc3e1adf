//! A builder for programs. The op's rule determines the type of each result.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::Code;
use tessera_mesh::Mesh;

use crate::codes::{T0210, T0215};
use crate::rules::{RuleError, infer_types};
use crate::{
    Attr, Attrs, Buffer, BufferId, DType, Dialect, Op, Opcode, Program, StreamId, StreamKind, Type, Value,
    ValueId,
};

/// Builds a program op by op. If a rule rejects an op, the builder records the error, uses scalars
/// as results and continues, so that [`Builder::finish`] reports every error at once.
#[derive(Debug)]
pub struct Builder {
    program: Program,
    buffers: BTreeMap<String, BufferId>,
    names: BTreeSet<String>,
    /// Next numeric suffix to try for each label.
    numbers: BTreeMap<String, u64>,
    /// Op index of each source, by opcode, name and, for the parts of a quantized weight, `load`
    /// value.
    sources: BTreeMap<(Opcode, String, Option<String>), usize>,
    /// Index of the op that defines each value.
    definitions: Vec<Option<usize>>,
    errors: Vec<RuleError>,
    pending: PendingOp,
}

#[derive(Debug, Default)]
struct PendingOp {
    attrs: Attrs,
    keyed: Vec<(&'static str, ValueId)>,
    after: Vec<ValueId>,
    stream: Option<StreamId>,
    label: Option<String>,
}

impl Builder {
    /// Starts a logical program without ops; it has one stream, `compute`.
    #[must_use]
    pub fn new_logical(name: &str) -> Builder {
        Builder::new(name, Dialect::Logical, "", Mesh::default(), &[StreamKind::Compute])
    }

    /// Starts the program of a role without ops. Its first stream is the default of the ops.
    #[must_use]
    pub fn new_role(name: &str, role: &str, mesh: Mesh, streams: &[impl AsRef<str>]) -> Builder {
        Builder::new(name, Dialect::Role, role, mesh, streams)
    }

    fn new(name: &str, dialect: Dialect, role: &str, mesh: Mesh, streams: &[impl AsRef<str>]) -> Builder {
        Builder {
            program: Program {
                name: name.to_string(),
                dialect,
                role: role.to_string(),
                mesh,
                streams: streams.iter().map(|s| s.as_ref().to_string()).collect(),
                buffers: Vec::new(),
                values: Vec::new(),
                ops: Vec::new(),
            },
            buffers: BTreeMap::new(),
            names: BTreeSet::new(),
            numbers: BTreeMap::new(),
            sources: BTreeMap::new(),
            definitions: Vec::new(),
            errors: Vec::new(),
            pending: PendingOp::default(),
        }
    }

    /// Returns the program built so far.
    #[must_use]
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Returns the type of a value.
    #[must_use]
    pub fn type_of(&self, v: ValueId) -> &Type {
        self.program.type_of(v)
    }

    /// Returns what the rules have reported so far, in program order.
    #[must_use]
    pub fn errors(&self) -> &[RuleError] {
        &self.errors
    }

    /// Sets an attribute of the next op; a second value for the same name replaces the first.
    pub fn set_attr(&mut self, name: &str, value: impl Into<Attr>) -> &mut Builder {
        self.pending.attrs.insert(name.to_string(), value.into());
        self
    }

    /// Sets several attributes of the next op.
    pub fn set_attrs(&mut self, attrs: Attrs) -> &mut Builder {
        self.pending.attrs.extend(attrs);
        self
    }

    /// Gives the next op those of the named attributes that another op states.
    pub fn copy_attrs(&mut self, op: &Op, names: &[&str]) -> &mut Builder {
        let stated = op.attrs.iter().filter(|(name, _)| names.contains(&name.as_str()));
        self.pending.attrs.extend(stated.map(|(name, attr)| (name.clone(), attr.clone())));
        self
    }

    /// Adds a keyed operand to the next op.
    pub fn add_keyed(&mut self, name: &'static str, value: ValueId) -> &mut Builder {
        self.pending.keyed.push((name, value));
        self
    }

    /// Names the first result of the next op; results without a label are numbered.
    pub fn set_label(&mut self, name: &str) -> &mut Builder {
        self.pending.label = Some(name.to_string());
        self
    }

    /// Selects the stream of the next op; the default is the first stream.
    pub fn set_stream(&mut self, name: impl AsRef<str>) -> &mut Builder {
        let name = name.as_ref();
        let at = self.program.streams.iter().position(|s| s == name).unwrap_or_else(|| {
            self.program.streams.push(name.to_string());
            self.program.streams.len() - 1
        });
        self.pending.stream = Some(StreamId(at as u32));
        self
    }

    /// Makes the next op wait for an event.
    pub fn start_after(&mut self, event: ValueId) -> &mut Builder {
        self.pending.after.push(event);
        self
    }

    /// Declares a buffer, or returns the existing buffer of this name. A type that differs from the
    /// first declaration is an error.
    pub fn declare_buffer(&mut self, name: &str, ty: Type) -> BufferId {
        if let Some(b) = self.buffers.get(name).copied() {
            let known = self.program.buffer(b).ty.clone();
            self.check_same_type(&format!("buffer `{name}`"), &known, &ty);
            return b;
        }
        let id = BufferId(self.program.buffers.len() as u32);
        self.program.buffers.push(Buffer { name: name.to_string(), ty });
        self.buffers.insert(name.to_string(), id);
        id
    }

    /// Adds an input tensor of the call.
    pub fn add_input(&mut self, name: &str, ty: Type) -> ValueId {
        self.add_source(Opcode::Input, name, ty)
    }

    /// Adds a call scalar, or a call tensor with one number per frame.
    pub fn add_call_scalar(&mut self, name: &str, ty: Type) -> ValueId {
        self.add_source(Opcode::Call, name, ty)
    }

    /// Adds a weight whose shard on this role has type `ty`; a repeated request returns the first
    /// value.
    pub fn add_weight(&mut self, name: &str, ty: Type) -> ValueId {
        self.add_source(Opcode::Weight, name, ty)
    }

    /// Sets attributes of a source that was added before. A value that no source defines stays as it is.
    pub fn set_source_attrs(&mut self, source: ValueId, attrs: Attrs) {
        let op = self.definitions.get(source.0 as usize).copied().flatten();
        if let Some(op) = op.and_then(|i| self.program.ops.get_mut(i)).filter(|op| op.is_source()) {
            op.attrs.extend(attrs);
        }
    }

    fn add_source(&mut self, opcode: Opcode, name: &str, ty: Type) -> ValueId {
        // A source that is requested twice is the same value.
        let derived = self.pending.attrs.get("load").and_then(|l| match l {
            // The e4m3 values and their scales are two tensors with the name of one weight.
            Attr::Str(l) if l.contains("e4m3") => Some(l.clone()),
            _ => None,
        });
        let key = (opcode, name.to_string(), derived);
        if let Some(op) = self.sources.get(&key).map(|i| &self.program.ops[*i]) {
            let (result, loaded) = (op.results[0], op.attrs.get("load").cloned());
            let load = std::mem::take(&mut self.pending).attrs.remove("load");
            let what = format!("{} `{name}`", opcode.name());
            let known = self.type_of(result).clone();
            self.check_same_type(&what, &known, &ty);
            if load != loaded {
                let describe = |l: Option<Attr>| l.map_or("plain".to_string(), |l| format!("load = {l:?}"));
                self.push_error(
                    &T0215,
                    format!("{what} is requested as {} and as {}", describe(loaded), describe(load)),
                );
            }
            return result;
        }
        self.sources.insert(key, self.program.ops.len());
        self.push_op(opcode, false, Some(name.to_string()), None, &[], vec![ty])[0]
    }

    fn check_same_type(&mut self, what: &str, known: &Type, ty: &Type) {
        if known != ty {
            let [known, ty] = [known, ty].map(|t| t.display_on(&self.program.mesh));
            self.push_error(&T0210, format!("{what} is requested as {known} and as {ty}"));
        }
    }

    fn push_error(&mut self, code: &'static Code, message: String) {
        self.errors.push(RuleError { code, message: format!("@{}: {message}", self.program.name) });
    }

    /// Adds an output that passes a value to the host.
    pub fn add_output(&mut self, name: &str, value: ValueId) {
        self.push_op(Opcode::Output, false, Some(name.to_string()), None, &[value], vec![]);
    }

    /// Adds a view of a buffer: of all rows, unless the attributes `row` and `rows` select some.
    pub fn read_buffer(&mut self, buffer: BufferId) -> ValueId {
        self.push_op(Opcode::CacheRead, false, None, Some(buffer), &[], vec![])[0]
    }

    /// Adds a write of `value` to the buffer's rows from `row` (default 0) plus `first_row` on.
    pub fn write_buffer(&mut self, buffer: BufferId, value: ValueId) {
        self.push_op(Opcode::CacheWrite, false, None, Some(buffer), &[value], vec![]);
    }

    /// Adds an op with one result and returns the result.
    pub fn add_op(&mut self, opcode: Opcode, operands: &[ValueId]) -> ValueId {
        self.push_op(opcode, false, None, None, operands, vec![])[0]
    }

    /// Adds a quantization to e4m3. Returns the quantized rows and their scales.
    pub fn add_quantize(&mut self, x: ValueId) -> [ValueId; 2] {
        let made = self.push_op(Opcode::Quantize, false, None, None, &[x], vec![]);
        [made[0], made[1]]
    }

    /// Adds a receive; `ty` is the type of the value that the peer sends.
    pub fn add_recv(&mut self, ty: Type) -> ValueId {
        self.push_op(Opcode::Recv, true, None, None, &[], vec![ty])[0]
    }

    /// Adds an asynchronous collective and returns its ticket.
    pub fn add_issue(&mut self, opcode: Opcode, operands: &[ValueId]) -> ValueId {
        self.push_op(opcode, true, None, None, operands, vec![])[0]
    }

    /// Adds the wait for an issued collective. Returns the collective's result, or `None` for a
    /// send. `declared` is the type of a receive.
    pub fn add_wait(&mut self, ticket: ValueId, declared: Option<Type>) -> Option<ValueId> {
        self.push_op(Opcode::Wait, false, None, None, &[ticket], declared.into_iter().collect())
            .first()
            .copied()
    }

    fn push_op(
        &mut self,
        opcode: Opcode,
        issue: bool,
        name: Option<String>,
        buffer: Option<BufferId>,
        operands: &[ValueId],
        declared: Vec<Type>,
    ) -> Vec<ValueId> {
        let pending = std::mem::take(&mut self.pending);
        let mut keyed = pending.keyed;
        keyed.sort_by_key(|(k, _)| opcode.table_row().keyed_position(k));
        let mut op = Op {
            opcode,
            issue,
            name,
            buffer,
            operands: operands.to_vec(),
            keyed,
            attrs: pending.attrs,
            results: Vec::new(),
            // Call data is available before any stream starts.
            stream: match opcode {
                Opcode::Input | Opcode::Call | Opcode::Weight => StreamId(0),
                _ => pending.stream.unwrap_or(StreamId(0)),
            },
            after: pending.after,
            span: None,
        };
        let types = infer_types(&self.program, &op, &declared, &self.definitions).unwrap_or_else(|mut e| {
            e.message = format!(
                "{} ({} of @{}): {}",
                opcode.name(),
                self.program.ops.len(),
                self.program.name,
                e.message
            );
            self.errors.push(e);
            vec![Type::scalar(DType::F32); opcode.table_row().results]
        });
        op.results = types
            .into_iter()
            .enumerate()
            .map(|(i, ty)| {
                let id = ValueId(self.program.values.len() as u32);
                let name = match (&pending.label, i) {
                    (Some(l), 0) => self.unique_name(l),
                    _ => self.unique_name(&id.0.to_string()),
                };
                self.program.values.push(Value { name, ty });
                self.definitions.push(Some(self.program.ops.len()));
                id
            })
            .collect();
        let results = op.results.clone();
        self.program.ops.push(op);
        results
    }

    /// Returns a unique value name that the text form can represent.
    fn unique_name(&mut self, label: &str) -> String {
        let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '-') { c } else { '_' };
        let label: String = label.chars().map(plain).collect();
        if !label.is_empty() && self.names.insert(label.clone()) {
            return label;
        }
        let number = self.numbers.entry(label.clone()).or_insert(1);
        loop {
            let name = format!("{label}.{number}");
            *number += 1;
            if self.names.insert(name.clone()) {
                return name;
            }
        }
    }

    /// Returns the program.
    ///
    /// # Errors
    /// Every error that a rule reported, in program order.
    pub fn finish(self) -> Result<Program, Vec<RuleError>> {
        if self.errors.is_empty() { Ok(self.program) } else { Err(self.errors) }
    }
}

impl From<i64> for Attr {
    fn from(v: i64) -> Attr {
        Attr::Int(v)
    }
}
impl From<u64> for Attr {
    fn from(v: u64) -> Attr {
        Attr::Int(i64::try_from(v).unwrap_or(i64::MAX))
    }
}
impl From<f64> for Attr {
    fn from(v: f64) -> Attr {
        Attr::Float(v)
    }
}
impl From<&str> for Attr {
    fn from(v: &str) -> Attr {
        Attr::Str(v.to_string())
    }
}
impl From<Vec<i64>> for Attr {
    fn from(v: Vec<i64>) -> Attr {
        Attr::Ints(v)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{parse, print};

    #[test]
    fn a_name_has_one_type() {
        let (a, b) = (Type::new(DType::F32, [2, 2]), Type::new(DType::F32, [2, 3]));
        let messages = |f: &dyn Fn(&mut Builder)| -> Vec<String> {
            let mut b = Builder::new_logical("p");
            f(&mut b);
            b.finish().err().unwrap_or_default().into_iter().map(|e| e.message).collect()
        };
        let twice = |x: &Type, y: &Type| {
            let sources = messages(&|p| {
                p.add_weight("w", x.clone());
                p.add_weight("w", y.clone());
            });
            let buffers = messages(&|p| {
                p.declare_buffer("w", x.clone());
                p.declare_buffer("w", y.clone());
            });
            (sources, buffers)
        };
        assert_eq!(twice(&a, &a), (vec![], vec![]));
        let said = |what: &str| vec![format!("@p: {what} `w` is requested as f32[2, 2] and as f32[2, 3]")];
        assert_eq!(twice(&a, &b), (said("weight"), said("buffer")));
        let loads = messages(&|p| {
            p.set_attr("load", "patch").add_weight("w", a.clone());
            p.add_weight("w", a.clone());
        });
        assert_eq!(loads.len(), 1, "{loads:?}");
        assert!(loads[0].contains("load") && loads[0].contains("plain"), "{loads:?}");
    }

    #[test]
    fn a_wait_finds_its_issue_at_any_distance() {
        let mesh: Mesh = "tp=2".parse().unwrap();
        let mut b = Builder::new_role("p", "r", mesh, &["compute"]);
        let x = b.add_weight("x", Type::new(DType::F32, [4]));
        let mut tickets = Vec::new();
        for i in 0..1000u64 {
            b.add_weight("x", Type::new(DType::F32, [4]));
            let y = b
                .set_label("cut")
                .set_attr("axis", "tp")
                .set_attr("dim", 0u64)
                .add_op(Opcode::TakeShard, &[x]);
            let (collective, operand) =
                if i % 2 == 0 { (Opcode::AllGather, y) } else { (Opcode::Broadcast, x) };
            let key = if i % 2 == 0 { "dim" } else { "root" };
            tickets.push(
                b.set_label("ticket")
                    .set_attr("axis", "tp")
                    .set_attr(key, 0u64)
                    .add_issue(collective, &[operand]),
            );
        }
        for t in tickets.into_iter().rev() {
            b.set_label("y").add_wait(t, None);
        }
        let p = b.finish().unwrap();
        assert_eq!((p.ops.len(), p.values[3000].name.as_str()), (3001, "y.999"));
        assert_eq!(parse(&print(&p), "p").unwrap().without_spans(), p);
        let definitions = p.defining_ops();
        for op in &p.ops {
            let written: Vec<Type> = op.results.iter().map(|r| p.type_of(*r).clone()).collect();
            assert_eq!(infer_types(&p, op, &written, &definitions).unwrap(), written);
            // A wait without its issue has no type.
            assert_eq!(infer_types(&p, op, &written, &[]).is_err(), op.opcode == Opcode::Wait);
        }
    }

    #[test]
    fn built_programs_round_trip() {
        let mut b = Builder::new_logical("p");
        let x = b.set_label("1").set_stream("io").add_input("x \"quoted\"", Type::new(DType::F32, [2, 2]));
        let y = b.set_label("a b").add_op(Opcode::Silu, &[x]);
        let z = b.set_label("a b").set_attr("eps", f64::NAN).add_op(Opcode::Add, &[x, y]);
        b.add_output("z", z);
        assert!(b.finish().is_err(), "add has no eps");
        let mut b = Builder::new_logical("p");
        let x = b.set_label("1").set_stream("io").add_input("x \"quoted\"", Type::new(DType::F32, [2, 2]));
        let y = b.add_op(Opcode::Silu, &[x]);
        let z = b.set_label("a b").add_op(Opcode::Add, &[x, y]);
        let w = b.set_label("a b").set_stream("io").add_op(Opcode::Add, &[x, z]);
        b.add_output("w", w);
        let p = b.finish().unwrap();
        let names: Vec<&str> = p.values.iter().map(|v| v.name.as_str()).collect();
        assert_eq!(names, ["1", "1.1", "a_b", "a_b.1"]);
        assert_eq!(parse(&print(&p), "p").unwrap().without_spans(), p);
    }
}
