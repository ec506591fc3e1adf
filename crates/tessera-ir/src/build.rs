//! Builds programs op by op; each result's type comes from the op's rule.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::Code;
use tessera_mesh::Mesh;

use crate::rules::{RuleError, T0210, T0215, infer_with};
use crate::{
    Attr, Attrs, Buffer, BufferId, DType, Dialect, Op, Opcode, Program, StreamId, Type, Value, ValueId,
};

/// Makes a program. A rule that refuses an op is kept and reported by [`Builder::finish`]; building goes on
/// with a scalar in its place, so that one call collects every mistake.
#[derive(Debug)]
pub struct Builder {
    program: Program,
    buffers: BTreeMap<String, BufferId>,
    names: BTreeSet<String>,
    /// The first number behind each label that may still be free.
    numbers: BTreeMap<String, u64>,
    /// Sources by op and name, and by what is loaded beside the tensor itself.
    sources: BTreeMap<(Opcode, String, Option<String>), usize>,
    /// The op that defines each value.
    definitions: Vec<Option<usize>>,
    errors: Vec<RuleError>,
    pending: Pending,
}

#[derive(Debug, Default)]
struct Pending {
    attrs: Attrs,
    keyed: Vec<(&'static str, ValueId)>,
    after: Vec<ValueId>,
    stream: Option<StreamId>,
    label: Option<String>,
}

impl Builder {
    /// A logical program over one stream.
    #[must_use]
    pub fn logical(name: &str) -> Builder {
        Builder::new(name, Dialect::Logical, "", Mesh::default(), &["compute"])
    }

    /// A program of a role.
    #[must_use]
    pub fn role(name: &str, role: &str, mesh: Mesh, streams: &[&str]) -> Builder {
        Builder::new(name, Dialect::Role, role, mesh, streams)
    }

    fn new(name: &str, dialect: Dialect, role: &str, mesh: Mesh, streams: &[&str]) -> Builder {
        Builder {
            program: Program {
                name: name.to_string(),
                dialect,
                role: role.to_string(),
                mesh,
                streams: streams.iter().map(|s| (*s).to_string()).collect(),
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
            pending: Pending::default(),
        }
    }

    /// The program so far.
    #[must_use]
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Type of a value.
    #[must_use]
    pub fn ty(&self, v: ValueId) -> &Type {
        self.program.ty(v)
    }

    /// Sets a constant of the next op.
    pub fn attr(&mut self, name: &str, value: impl Into<Attr>) -> &mut Builder {
        self.pending.attrs.insert(name.to_string(), value.into());
        self
    }

    /// Sets all constants of the next op.
    pub fn attrs(&mut self, attrs: Attrs) -> &mut Builder {
        self.pending.attrs.extend(attrs);
        self
    }

    /// Gives the next op a keyed operand.
    pub fn key(&mut self, name: &'static str, value: ValueId) -> &mut Builder {
        self.pending.keyed.push((name, value));
        self
    }

    /// Names the next op's first result; otherwise results are numbered.
    pub fn label(&mut self, name: &str) -> &mut Builder {
        self.pending.label = Some(name.to_string());
        self
    }

    /// Puts the next op on a stream; the first stream otherwise.
    pub fn stream(&mut self, name: &str) -> &mut Builder {
        let at = self.program.streams.iter().position(|s| s == name).unwrap_or_else(|| {
            self.program.streams.push(name.to_string());
            self.program.streams.len() - 1
        });
        self.pending.stream = Some(StreamId(at as u32));
        self
    }

    /// Makes the next op start after an event.
    pub fn after(&mut self, event: ValueId) -> &mut Builder {
        self.pending.after.push(event);
        self
    }

    /// Declares a buffer, or finds it by name; a type that differs from the first is a mistake.
    pub fn buffer(&mut self, name: &str, ty: Type) -> BufferId {
        if let Some(b) = self.buffers.get(name).copied() {
            let known = self.program.buffer(b).ty.clone();
            self.same_type(&format!("buffer `{name}`"), &known, &ty);
            return b;
        }
        let id = BufferId(self.program.buffers.len() as u32);
        self.program.buffers.push(Buffer { name: name.to_string(), ty });
        self.buffers.insert(name.to_string(), id);
        id
    }

    /// A tensor of the call.
    pub fn input(&mut self, name: &str, ty: Type) -> ValueId {
        self.source(Opcode::Input, name, ty)
    }

    /// A scalar of the call, or one number per frame.
    pub fn call(&mut self, name: &str, ty: Type) -> ValueId {
        self.source(Opcode::Call, name, ty)
    }

    /// A slice of a weight.
    pub fn weight(&mut self, name: &str, ty: Type) -> ValueId {
        self.source(Opcode::Weight, name, ty)
    }

    fn source(&mut self, opcode: Opcode, name: &str, ty: Type) -> ValueId {
        // A source that is asked for twice is the same value.
        let derived = self.pending.attrs.get("load").and_then(|l| match l {
            // Numbers and scales are two tensors, made of one.
            Attr::Str(l) if l.starts_with("e4m3") => Some(l.clone()),
            _ => None,
        });
        let key = (opcode, name.to_string(), derived);
        if let Some(op) = self.sources.get(&key).map(|i| &self.program.ops[*i]) {
            let (result, loaded) = (op.results[0], op.attrs.get("load").cloned());
            let load = std::mem::take(&mut self.pending).attrs.remove("load");
            let what = format!("{} `{name}`", opcode.name());
            let known = self.ty(result).clone();
            self.same_type(&what, &known, &ty);
            if load != loaded {
                let say = |l: Option<Attr>| l.map_or("plain".to_string(), |l| format!("load = {l:?}"));
                self.mistake(&T0215, format!("{what} is asked for as {} and as {}", say(loaded), say(load)));
            }
            return result;
        }
        self.sources.insert(key, self.program.ops.len());
        self.push(opcode, false, Some(name.to_string()), None, &[], vec![ty])[0]
    }

    fn same_type(&mut self, what: &str, known: &Type, ty: &Type) {
        if known != ty {
            let [known, ty] = [known, ty].map(|t| t.display(&self.program.mesh));
            self.mistake(&T0210, format!("{what} is asked for as {known} and as {ty}"));
        }
    }

    fn mistake(&mut self, code: &'static Code, message: String) {
        self.errors.push(RuleError { code, message: format!("@{}: {message}", self.program.name) });
    }

    /// Hands a value to the host.
    pub fn output(&mut self, name: &str, value: ValueId) {
        self.push(Opcode::Output, false, Some(name.to_string()), None, &[value], vec![]);
    }

    /// Reads a buffer.
    pub fn read(&mut self, buffer: BufferId) -> ValueId {
        self.push(Opcode::CacheRead, false, None, Some(buffer), &[], vec![])[0]
    }

    /// Writes a buffer.
    pub fn write(&mut self, buffer: BufferId, value: ValueId) {
        self.push(Opcode::CacheWrite, false, None, Some(buffer), &[value], vec![]);
    }

    /// Any op with one result.
    pub fn op(&mut self, opcode: Opcode, operands: &[ValueId]) -> ValueId {
        self.push(opcode, false, None, None, operands, vec![])[0]
    }

    /// Rows in e4m3 and their scales.
    pub fn quantize(&mut self, x: ValueId) -> [ValueId; 2] {
        let made = self.push(Opcode::Quantize, false, None, None, &[x], vec![]);
        [made[0], made[1]]
    }

    /// A receive, whose type is what the sender sends.
    pub fn recv(&mut self, ty: Type) -> ValueId {
        self.push(Opcode::Recv, true, None, None, &[], vec![ty])[0]
    }

    /// Issues a collective; the ticket.
    pub fn issue(&mut self, opcode: Opcode, operands: &[ValueId]) -> ValueId {
        self.push(opcode, true, None, None, operands, vec![])[0]
    }

    /// Waits for an issued collective: its result, or nothing for a send. `declared` is the type of a receive.
    pub fn wait(&mut self, ticket: ValueId, declared: Option<Type>) -> Option<ValueId> {
        self.push(Opcode::Wait, false, None, None, &[ticket], declared.into_iter().collect()).first().copied()
    }

    fn push(
        &mut self,
        opcode: Opcode,
        issue: bool,
        name: Option<String>,
        buffer: Option<BufferId>,
        operands: &[ValueId],
        declared: Vec<Type>,
    ) -> Vec<ValueId> {
        let pending = std::mem::take(&mut self.pending);
        let order = opcode.row().keyed;
        let mut keyed = pending.keyed;
        keyed.sort_by_key(|(k, _)| order.iter().position(|o| o.trim_end_matches('?') == *k));
        let mut op = Op {
            opcode,
            issue,
            name,
            buffer,
            operands: operands.to_vec(),
            keyed,
            attrs: pending.attrs,
            results: Vec::new(),
            // What the call brings is there before any stream runs.
            stream: match opcode {
                Opcode::Input | Opcode::Call | Opcode::Weight => StreamId(0),
                _ => pending.stream.unwrap_or(StreamId(0)),
            },
            after: pending.after,
            span: None,
        };
        let types = infer_with(&self.program, &op, &declared, &self.definitions).unwrap_or_else(|mut e| {
            e.message = format!(
                "{} ({} of @{}): {}",
                opcode.name(),
                self.program.ops.len(),
                self.program.name,
                e.message
            );
            self.errors.push(e);
            vec![Type::scalar(DType::F32); opcode.row().results]
        });
        op.results = types
            .into_iter()
            .enumerate()
            .map(|(i, ty)| {
                let id = ValueId(self.program.values.len() as u32);
                let name = match (&pending.label, i) {
                    (Some(l), 0) => self.unique(l),
                    _ => self.unique(&id.0.to_string()),
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

    /// A name that the text can hold and that no other value has.
    fn unique(&mut self, label: &str) -> String {
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

    /// The program, or what its rules refused.
    ///
    /// # Errors
    /// Every refusal, in order.
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
            let mut b = Builder::logical("p");
            f(&mut b);
            b.finish().err().unwrap_or_default().into_iter().map(|e| e.message).collect()
        };
        let twice = |x: &Type, y: &Type| {
            let sources = messages(&|p| {
                p.weight("w", x.clone());
                p.weight("w", y.clone());
            });
            let buffers = messages(&|p| {
                p.buffer("w", x.clone());
                p.buffer("w", y.clone());
            });
            (sources, buffers)
        };
        assert_eq!(twice(&a, &a), (vec![], vec![]));
        let said = |what: &str| vec![format!("@p: {what} `w` is asked for as f32[2, 2] and as f32[2, 3]")];
        assert_eq!(twice(&a, &b), (said("weight"), said("buffer")));
        let loads = messages(&|p| {
            p.attr("load", "patch").weight("w", a.clone());
            p.weight("w", a.clone());
        });
        assert_eq!(loads.len(), 1, "{loads:?}");
        assert!(loads[0].contains("load") && loads[0].contains("plain"), "{loads:?}");
    }

    #[test]
    fn a_wait_finds_its_issue_wherever_it_stands() {
        let mesh: Mesh = "tp=2".parse().unwrap();
        let mut b = Builder::role("p", "r", mesh, &["compute"]);
        let x = b.weight("x", Type::new(DType::F32, [4]));
        let mut tickets = Vec::new();
        for i in 0..1000u64 {
            b.weight("x", Type::new(DType::F32, [4]));
            let y = b.label("cut").attr("axis", "tp").attr("dim", 0u64).op(Opcode::TakeShard, &[x]);
            let (collective, operand) =
                if i % 2 == 0 { (Opcode::AllGather, y) } else { (Opcode::Broadcast, x) };
            let key = if i % 2 == 0 { "dim" } else { "root" };
            tickets.push(b.label("ticket").attr("axis", "tp").attr(key, 0u64).issue(collective, &[operand]));
        }
        for t in tickets.into_iter().rev() {
            b.label("y").wait(t, None);
        }
        let p = b.finish().unwrap();
        assert_eq!((p.ops.len(), p.values[3000].name.as_str()), (3001, "y.999"));
        assert_eq!(parse(&print(&p), "p").unwrap().without_spans(), p);
        let definitions = p.definitions();
        for op in &p.ops {
            let written: Vec<Type> = op.results.iter().map(|r| p.ty(*r).clone()).collect();
            let scanned = crate::rules::infer(&p, op, &written).unwrap();
            assert_eq!(infer_with(&p, op, &written, &definitions).unwrap(), scanned);
            // Without its issue a wait has no type.
            assert_eq!(infer_with(&p, op, &written, &[]).is_err(), op.opcode == Opcode::Wait);
        }
    }

    #[test]
    fn what_is_built_reads_back() {
        let mut b = Builder::logical("p");
        let x = b.label("1").stream("io").input("x \"quoted\"", Type::new(DType::F32, [2, 2]));
        let y = b.label("a b").op(Opcode::Silu, &[x]);
        let z = b.label("a b").attr("eps", f64::NAN).op(Opcode::Add, &[x, y]);
        b.output("z", z);
        assert!(b.finish().is_err(), "add has no eps");
        let mut b = Builder::logical("p");
        let x = b.label("1").stream("io").input("x \"quoted\"", Type::new(DType::F32, [2, 2]));
        let y = b.op(Opcode::Silu, &[x]);
        let z = b.label("a b").op(Opcode::Add, &[x, y]);
        let w = b.label("a b").stream("io").op(Opcode::Add, &[x, z]);
        b.output("w", w);
        let p = b.finish().unwrap();
        let names: Vec<&str> = p.values.iter().map(|v| v.name.as_str()).collect();
        assert_eq!(names, ["1", "1.1", "a_b", "a_b.1"]);
        assert_eq!(parse(&print(&p), "p").unwrap().without_spans(), p);
    }
}
