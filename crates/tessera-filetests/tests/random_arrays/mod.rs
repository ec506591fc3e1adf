//! Draws array programs: logical programs of matmuls, norms, softmaxes and more, with layouts of
//! sources and outputs, and the mesh and the streams on which they run.

use std::collections::BTreeMap;

use tessera_base::random::{DrawKey, Rng, fill_normals};
use tessera_ir::{Attr, Builder, DType, Opcode, Type, ValueId};
use tessera_mesh::{AxisLayout, Layout, Mesh, Shard};
use tessera_plan::layouts::{LaidOutProgram, StreamOverlap};
use tessera_reference::{CallInputs, Tensor};

/// Ops that the drawn programs have between them, beside collectives.
pub const DRAWN_OPS: [Opcode; 15] = [
    Opcode::Matmul,
    Opcode::BiasAct,
    Opcode::Add,
    Opcode::Mul,
    Opcode::Silu,
    Opcode::Clamp,
    Opcode::RmsNorm,
    Opcode::LayerNorm,
    Opcode::Softmax,
    Opcode::Bmm,
    Opcode::TakeRows,
    Opcode::HeadNorm,
    Opcode::Attention,
    Opcode::ScaleShift,
    Opcode::RowSquareSum,
];

const SEED: u64 = 11;

/// Meshes of at most six ranks.
const MESHES: [&str; 9] =
    ["tp=2", "tp=3", "tp=5", "tp=2,ep=3", "tp=3,dp=2", "ep=2,pp=2", "tp=2,pp=3", "pp=4", "dp=2,ep=2"];

const OVERLAPS: [&[(&str, &str)]; 4] = [
    &[],
    &[("compute", "tp_collective")],
    &[("compute", "tp_collective"), ("compute", "a2a"), ("compute", "pp")],
    &[
        ("compute", "tp_collective"),
        ("compute", "a2a"),
        ("compute", "pp"),
        ("tp_collective", "a2a"),
        ("a2a", "pp"),
    ],
];

const EXTENTS: [u64; 6] = [6, 7, 8, 9, 10, 12];

/// An array program with its values.
pub struct ArrayCase {
    pub index: u32,
    pub mesh: Mesh,
    pub program: LaidOutProgram,
    pub overlap: StreamOverlap,
    pub weights: BTreeMap<String, Tensor>,
    pub call: CallInputs,
    /// First lines of a test file, which state the values.
    pub header: String,
}

impl ArrayCase {
    pub fn draw(index: u32) -> ArrayCase {
        let mut rng = Rng::new(SEED, [index, 0]);
        let mesh: Mesh = rng.pick_one(&MESHES).parse().unwrap();
        let overlap = StreamOverlap::new(rng.pick_one(&OVERLAPS)).unwrap();
        let mut drawing = Drawing {
            rng,
            mesh,
            b: Builder::new_logical(&format!("p{index}")),
            values: Vec::new(),
            made: Vec::new(),
            sources: BTreeMap::new(),
            weights: BTreeMap::new(),
            call: CallInputs::default(),
            header: "// test: eval\n".to_string(),
        };
        let first = drawing.pick_extents(if index.is_multiple_of(3) { 3 } else { 2 });
        let x = drawing.add_source(&first);
        drawing.values.push(x);
        for _ in 0..4 + drawing.rng.next_below(5) {
            drawing.add_op();
        }
        let mut outputs = BTreeMap::new();
        let made = drawing.made.clone();
        for (n, v) in made.iter().rev().take(3).enumerate() {
            let name = format!("out{n}");
            if drawing.rng.next_ratio(1, 2) {
                let shape = drawing.b.type_of(*v).shape.clone();
                outputs.insert(name.clone(), drawing.pick_layout(&shape));
            }
            drawing.b.add_output(&name, *v);
        }
        let program = drawing.b.finish().unwrap_or_else(|e| panic!("case {index}: {e:?}"));
        ArrayCase {
            index,
            mesh,
            program: LaidOutProgram { program, sources: drawing.sources, values: BTreeMap::new(), outputs },
            overlap,
            weights: drawing.weights,
            call: drawing.call,
            header: drawing.header,
        }
    }

    pub fn describe(&self) -> String {
        format!("case {} on {}", self.index, self.mesh)
    }
}

struct Drawing {
    rng: Rng,
    mesh: Mesh,
    b: Builder,
    /// Values that further ops may read.
    values: Vec<ValueId>,
    /// Results of ops, some of which are outputs.
    made: Vec<ValueId>,
    sources: BTreeMap<String, Layout>,
    weights: BTreeMap<String, Tensor>,
    call: CallInputs,
    header: String,
}

impl Drawing {
    fn pick_extents(&mut self, dims: usize) -> Vec<u64> {
        (0..dims).map(|_| self.rng.pick_one(&EXTENTS)).collect()
    }

    /// Draws a layout: on each axis replicated, or sharded over a dim that is not sharded yet.
    fn pick_layout(&mut self, shape: &[u64]) -> Layout {
        let mut layout = Layout::REPLICATED;
        let mut free: Vec<usize> = (0..shape.len()).collect();
        for axis in self.mesh.active_axes().collect::<Vec<_>>() {
            if free.is_empty() || self.rng.next_ratio(2, 5) {
                continue;
            }
            let dim = free.remove(self.rng.next_below(free.len()));
            let unit = self.rng.pick_one(&[1, 1, 2, 3]);
            let parts = self.mesh.axis_size(axis);
            let shard = Shard::new(dim, shape[dim], unit, parts).or(Shard::new(dim, shape[dim], 1, parts));
            if let Some(shard) = shard {
                layout = layout.with_axis(axis, AxisLayout::Shard(shard));
            }
        }
        layout
    }

    /// Adds an input or a weight of normal numbers, with a layout.
    fn add_source(&mut self, shape: &[u64]) -> ValueId {
        let n = self.sources.len();
        let layout = self.pick_layout(shape);
        let seed = 100 + n as u64;
        let count: u64 = shape.iter().product();
        let mut numbers = vec![0.0f32; count as usize];
        fill_normals(DrawKey { seed, chunk: 0, draw: 0 }, 0, &mut numbers);
        let extents: Vec<usize> = shape.iter().map(|n| *n as usize).collect();
        let tensor = Tensor::new(&extents, numbers.into_iter().map(f64::from).collect());
        let ty = Type::new(DType::F32, shape);
        let (kind, name) =
            if self.rng.next_ratio(1, 2) { ("input", format!("x{n}")) } else { ("weight", format!("w{n}")) };
        self.header += &format!("// {kind} {name}: {shape:?} = normal {seed}\n");
        self.sources.insert(name.clone(), layout);
        if kind == "input" {
            self.call = std::mem::take(&mut self.call).with_input(&name, tensor);
            self.b.add_input(&name, ty)
        } else {
            self.weights.insert(name.clone(), tensor);
            self.b.add_weight(&name, ty)
        }
    }

    /// Returns a value of this shape: often one that exists, otherwise a new source.
    fn find_or_add(&mut self, shape: &[u64]) -> ValueId {
        let same: Vec<ValueId> =
            self.values.iter().copied().filter(|v| self.b.type_of(*v).shape == shape).collect();
        if !same.is_empty() && self.rng.next_ratio(2, 3) {
            return self.rng.pick_one(&same);
        }
        self.add_source(shape)
    }

    fn add_op(&mut self) {
        let x = if self.rng.next_ratio(1, 2) {
            self.values[self.values.len() - 1]
        } else {
            self.rng.pick_one(&self.values)
        };
        let shape = self.b.type_of(x).shape.clone();
        let last = shape[shape.len() - 1];
        let opcode = self.rng.pick_one(&DRAWN_OPS);
        let y = match (opcode, shape.len()) {
            (Opcode::Matmul, 2) => self.add_matmul(x, last),
            (Opcode::BiasAct, 2) => {
                let bias = self.add_source(&[last]);
                self.b.set_attr("act", "silu").add_op(opcode, &[x, bias])
            }
            (Opcode::Add | Opcode::Mul, _) => {
                let y = self.find_or_add(&shape);
                self.b.add_op(opcode, &[x, y])
            }
            (Opcode::Clamp, _) => self.b.set_attr("limit", 2.0).add_op(opcode, &[x]),
            (Opcode::RmsNorm, _) => {
                let w = self.add_source(&[last]);
                self.b.set_attr("eps", 0.1).add_op(opcode, &[x, w])
            }
            (Opcode::LayerNorm, 2) => {
                let [w, bias] = [(); 2].map(|()| self.add_source(&[last]));
                self.b.set_attr("eps", 0.1).add_op(opcode, &[x, w, bias])
            }
            (Opcode::ScaleShift, _) => {
                let [w, bias] = [(); 2].map(|()| self.add_source(&[last]));
                self.b.add_op(opcode, &[x, w, bias])
            }
            (Opcode::Softmax, dims) => {
                // CPU ranks have a softmax over the last dim only.
                let dim = if self.rng.next_ratio(1, 4) { self.rng.next_below(dims) } else { dims - 1 };
                let dim = dim as u64;
                self.b.set_attr("dim", dim).add_op(opcode, &[x])
            }
            (Opcode::Bmm, _) => self.add_bmm(x, &shape),
            (Opcode::TakeRows, _) => {
                self.b.set_attr("row", 0u64).set_attr("rows", shape[0] - 1).add_op(opcode, &[x])
            }
            (Opcode::HeadNorm, 2) => {
                let head_dim = if last.is_multiple_of(3) { 3 } else { last };
                let w = self.add_source(&[head_dim]);
                self.b.set_attr("head_dim", head_dim).set_attr("eps", 0.1).add_op(opcode, &[x, w])
            }
            (Opcode::Attention, 2) => {
                let head_dim = if last.is_multiple_of(2) { 2 } else { last };
                let rows = self.rng.pick_one(&EXTENTS);
                let [k, v] = [(); 2].map(|()| self.find_or_add(&[rows, last]));
                self.b.set_attr("head_dim", head_dim).add_op(opcode, &[x, k, v])
            }
            (Opcode::RowSquareSum, 2) if last > 1 => self.b.add_op(opcode, &[x]),
            _ => self.b.add_op(Opcode::Silu, &[x]),
        };
        // A dim smaller than an axis could not be sharded by a source that later ops need.
        if self.b.type_of(y).shape.iter().all(|n| *n >= EXTENTS[0]) {
            self.values.push(y);
        }
        self.made.push(y);
    }

    fn add_matmul(&mut self, x: ValueId, inner: u64) -> ValueId {
        let columns = self.rng.pick_one(&EXTENTS);
        let w = self.find_or_add(&[columns, inner]);
        if self.rng.next_ratio(1, 3) {
            let bias = self.add_source(&[columns]);
            self.b.set_attr("act", "silu").add_keyed("bias", bias);
        }
        self.b.add_op(Opcode::Matmul, &[x, w])
    }

    fn add_bmm(&mut self, x: ValueId, shape: &[u64]) -> ValueId {
        let (batch, inner) = (&shape[..shape.len() - 2], shape[shape.len() - 1]);
        let columns = self.rng.pick_one(&EXTENTS);
        let transposed = self.rng.next_ratio(1, 2);
        let matrix = if transposed { [columns, inner] } else { [inner, columns] };
        let y = self.find_or_add(&[batch, &matrix].concat());
        self.b.set_attr("scale", 0.25).set_attr("transposed", Attr::Bool(transposed));
        self.b.add_op(Opcode::Bmm, &[x, y])
    }
}
