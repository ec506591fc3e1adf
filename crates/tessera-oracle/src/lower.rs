//! One rank's list of collectives as a typed program: operands of the layouts that they need, streams, and the events
//! that make it right.

use tessera_ir::{Attr, BufferId, Builder, DType, Op, Opcode, Program, Type, ValueId};
use tessera_mesh::{Axis, AxisLayout, Group, Mesh, Rank, Shard};

use crate::edit::fuse;
use crate::set::{Call, Cut, Held, SHAPES, What};
use tessera_base::random::Dice;

const STREAMS: [&str; 3] = ["compute", "comm", "io"];
/// An extent that 2, 3 and 4 ranks cut unevenly.
const UNEVEN: u64 = 7;

/// An axis, or with a number of positions each block of it.
type Over = (Axis, Option<u32>);

/// What all ranks of a set share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Style {
    /// Streams of each program, at most three.
    pub(crate) streams: usize,
    /// Ranks with equal lists get equal programs.
    pub(crate) alike: bool,
}

/// The program of a rank.
pub(crate) fn lower(mesh: &Mesh, rank: usize, style: Style, calls: &[Call]) -> Result<Program, String> {
    let streams = style.streams;
    let coord = mesh.coord_of(Rank(rank as u32));
    let at: Vec<String> = if mesh.contains(Rank(rank as u32)) {
        mesh.axes().map(|a| format!("@{a}{}", coord.on(a))).collect()
    } else {
        vec![format!("@out{rank}")]
    };
    let role = format!("r{rank}{}", at.concat());
    let mut l = Lower {
        b: Builder::role("denoise", &role, *mesh, &STREAMS[..streams]),
        mesh,
        streams,
        coord: coord.0,
        names: 0,
        made: Vec::new(),
        touched: Vec::new(),
        events: Vec::new(),
        open: Vec::new(),
        blocking: Vec::new(),
        batch: None,
        batched: None,
        graph: None,
        begins: 0,
        captured: Vec::new(),
        edge: 0,
    };
    for (i, call) in calls.iter().enumerate() {
        let repeats = calls[..i].iter().filter(|c| c.salt == call.salt).count();
        let who = if style.alike { u32::MAX } else { rank as u32 };
        let mut d = Dice::new(u64::from(call.salt), [who, repeats as u32]);
        l.call(&mut d, call);
    }
    l.wait_all();
    l.leave();
    let mut p = l.b.finish().map_err(|e| format!("{e:?}"))?;
    for (first, end, number) in &l.captured {
        let given = |o: &Op| matches!(o.opcode, Opcode::Input | Opcode::Call | Opcode::Weight);
        for op in p.ops[*first..*end].iter_mut().filter(|o| !given(o)) {
            op.attrs.insert("graph".to_string(), Attr::Str(format!("g{number}")));
        }
    }
    for issue in l.blocking.iter().rev() {
        fuse(&mut p, *issue);
    }
    Ok(p)
}

struct Lower<'a> {
    b: Builder,
    mesh: &'a Mesh,
    streams: usize,
    coord: [u32; 4],
    names: usize,
    /// Data values with the stream they were made on, given ones aside, and the op.
    made: Vec<(ValueId, usize, usize)>,
    /// Accesses of buffers: buffer, stream, op, whether it wrote.
    touched: Vec<(BufferId, usize, usize, bool)>,
    /// Events: stream, op, value.
    events: Vec<(usize, usize, ValueId)>,
    /// Issued and not yet waited for.
    open: Vec<Open>,
    /// Issues to be made one with the wait behind them.
    blocking: Vec<usize>,
    /// Batch of the call before, and its stream.
    batch: Option<u32>,
    batched: Option<usize>,
    /// The graph that is captured, and the op it begins with.
    graph: Option<u32>,
    begins: usize,
    /// Ops of graphs: first, behind the last, number.
    captured: Vec<(usize, usize, u32)>,
    /// What stands before this op has finished for every stream.
    edge: usize,
}

struct Open {
    ticket: ValueId,
    ty: Option<Type>,
    /// Calls until the wait; the largest number while its batch may go on.
    due: usize,
    stream: usize,
}

impl Lower<'_> {
    fn call(&mut self, d: &mut Dice, call: &Call) {
        // Members of a batch are one launch: nothing may come between them on their streams.
        let batched = call.batch.is_some();
        if call.graph != self.graph {
            self.enter(d, call.graph);
        }
        let goes_on = batched && self.batch == call.batch && self.batched.is_some();
        if !goes_on {
            self.open.iter_mut().filter(|o| o.due == usize::MAX).for_each(|o| o.due = 1 + d.below(3));
            self.wait_due();
        }
        self.batch = call.batch;
        let stream = self.batched.filter(|_| goes_on).unwrap_or(d.below(self.streams));
        self.batched = batched.then_some(stream);
        let mut operands = Vec::new();
        if !matches!(call.what, What::Recv { .. }) {
            operands.push(self.operand(d, call, stream));
        }
        self.events(stream, &operands, None);
        let (axis, ways) = match call.group {
            Group::World => ("world", None),
            Group::Axis { axis, ways } => (axis.name(), ways),
        };
        let b = self.b.attr("axis", axis);
        if let Some(w) = ways {
            b.attr("ways", i64::from(w));
        }
        if let Some(n) = call.batch {
            b.attr("batch", i64::from(n));
        }
        let reduction = |tree| if tree { "tree" } else { "sum" };
        let opcode = match call.what {
            What::AllReduce { tree } => {
                b.attr("reduction", reduction(tree));
                Opcode::AllReduce
            }
            What::AllGather { dim } => {
                b.attr("dim", dim as i64);
                Opcode::AllGather
            }
            What::ReduceScatter { dim, tree } => {
                b.attr("dim", dim as i64).attr("reduction", reduction(tree));
                Opcode::ReduceScatter
            }
            What::AllToAll { concat, .. } => {
                b.attr("concat", concat as i64).attr("split", 1 - concat as i64);
                Opcode::AllToAll
            }
            What::Broadcast { root } => {
                b.attr("root", root as i64);
                Opcode::Broadcast
            }
            What::Send { to } => {
                b.attr("to", to as i64);
                Opcode::Send
            }
            What::Recv { from } => {
                b.attr("from", from as i64);
                Opcode::Recv
            }
        };
        b.stream(STREAMS[stream]);
        let op = self.b.program().ops.len();
        let (ticket, ty) = match opcode {
            Opcode::Recv => {
                let ty = self.held(call);
                (self.b.recv(ty.clone()), Some(ty))
            }
            _ => (self.b.issue(opcode, &operands), None),
        };
        self.view_used(&operands, stream, op);
        let blocks = !batched && d.chance(2, 5);
        let (due, wait) = if blocks { (0, stream) } else { (1 + d.below(3), d.below(self.streams)) };
        let due = if batched { usize::MAX } else { due };
        self.open.push(Open { ticket, ty, due, stream: wait });
        if blocks {
            self.blocking.push(op);
            let last = self.open.len() - 1;
            self.wait(last);
        }
        if !batched {
            (0..2).for_each(|_| self.compute(d));
        }
    }

    /// Leaves the graph, and enters another or none. Tickets and events do not cross the edge: all streams meet there.
    fn enter(&mut self, d: &mut Dice, graph: Option<u32>) {
        self.wait_all();
        self.leave();
        let record = |l: &mut Self, stream: usize, after: &[ValueId]| {
            for e in after {
                l.b.after(*e);
            }
            l.b.stream(STREAMS[stream]);
            l.b.op(Opcode::EventRecord, &[])
        };
        let others: Vec<ValueId> = (1..self.streams).map(|s| record(self, s, &[])).collect();
        let all = record(self, 0, &others);
        // In a graph, what is on other streams begins with it in any case.
        if graph.is_none() || d.chance(1, 2) {
            for s in 1..self.streams {
                record(self, s, &[all]);
            }
        }
        self.events.clear();
        self.edge = self.b.program().ops.len();
        self.graph = graph;
        self.begins = self.edge;
        self.batched = None;
        if graph.is_some() {
            // The graph is launched on the stream of its first op.
            record(self, 0, &[]);
        }
    }

    fn leave(&mut self) {
        if let Some(number) = self.graph.take() {
            self.captured.push((self.begins, self.b.program().ops.len(), number));
        }
    }

    /// Waits that are due before the next call.
    fn wait_due(&mut self) {
        for i in (0..self.open.len()).rev() {
            self.open[i].due = self.open[i].due.saturating_sub(1);
            if self.open[i].due == 0 {
                self.wait(i);
            }
        }
    }

    fn wait_all(&mut self) {
        while !self.open.is_empty() {
            self.wait(0);
        }
    }

    fn wait(&mut self, open: usize) {
        let o = self.open.remove(open);
        self.b.stream(STREAMS[o.stream]);
        let op = self.b.program().ops.len();
        if let Some(v) = self.b.wait(o.ticket, o.ty) {
            self.made.push((v, o.stream, op));
        }
    }

    /// Now and then something that reads what is there: arithmetic, an output, a write to a cache.
    fn compute(&mut self, d: &mut Dice) {
        if self.made.is_empty() || d.chance(1, 2) {
            return;
        }
        let (v, ..) = self.made[d.below(self.made.len())];
        if self.b.ty(v).layout.partial().is_some() {
            return;
        }
        let stream = if d.chance(2, 3) { 0 } else { d.below(self.streams) };
        match d.below(6) {
            0 => {
                self.events(stream, &[v], None);
                self.b.stream(STREAMS[stream]);
                let name = format!("y{}", self.next_name());
                let op = self.b.program().ops.len();
                self.b.output(&name, v);
                self.view_used(&[v], stream, op);
            }
            1 | 2 if self.b.ty(v).layout.is_replicated() && self.viewed(v).is_none() => {
                let buffer = self.cache(self.b.ty(v).clone());
                self.write(buffer, v, stream);
            }
            3 if !self.touched.is_empty() => {
                let buffer = self.touched[d.below(self.touched.len())].0;
                let mut ty = self.b.program().buffer(buffer).ty.clone();
                ty.shape[0] /= 2;
                let name = format!("w{}", self.next_name());
                let w = self.b.weight(&name, ty);
                self.write(buffer, w, stream);
            }
            4 if !self.touched.is_empty() => {
                let buffer = self.touched[d.below(self.touched.len())].0;
                self.read(d, buffer, stream);
            }
            _ => {
                let with = if d.chance(1, 2) { vec![v, v] } else { vec![v] };
                self.events(stream, &with, None);
                self.b.stream(STREAMS[stream]);
                let op = self.b.program().ops.len();
                let y = self.b.op(if with.len() == 2 { Opcode::Add } else { Opcode::Silu }, &with);
                self.view_used(&with, stream, op);
                self.made.push((y, stream, op));
            }
        }
    }

    /// A cache of twice the rows of a value.
    fn cache(&mut self, mut ty: Type) -> BufferId {
        let name = format!("kv.{}.{}x{}", ty.dtype, ty.shape[0], ty.shape[1]);
        ty.shape[0] *= 2;
        self.b.buffer(&name, ty)
    }

    /// A value of the layout that the call needs.
    fn operand(&mut self, d: &mut Dice, call: &Call, stream: usize) -> ValueId {
        let shape = SHAPES[call.shape];
        let whole = Type::new(call.dtype, shape);
        let Group::Axis { axis, ways } = call.group else {
            return match call.what {
                What::AllReduce { tree } => {
                    let axis = self.mesh.axes().next().unwrap_or(Axis::Tp);
                    self.partial(d, (axis, None), shape, call.dtype, tree)
                }
                _ => self.handed(d, call, stream),
            };
        };
        let even = |dim: usize| self.even((axis, ways), dim, shape[dim]);
        match call.what {
            What::AllReduce { tree } | What::ReduceScatter { tree, .. } => {
                self.partial(d, (axis, ways), shape, call.dtype, tree)
            }
            What::AllGather { dim } => self.tensor(d, whole.on(axis, even(dim)), stream),
            What::AllToAll { concat, cut } => {
                let mut ty = whole;
                let mut on = even(concat);
                match cut {
                    Cut::Even => {}
                    Cut::Concat => (ty.shape[concat], on) = self.uneven((axis, ways), concat),
                    Cut::Split => ty.shape[1 - concat] = UNEVEN,
                }
                self.tensor(d, ty.on(axis, on), stream)
            }
            _ => self.handed(d, call, stream),
        }
    }

    /// What a broadcast or a send moves.
    fn handed(&mut self, d: &mut Dice, call: &Call, stream: usize) -> ValueId {
        let ty = self.held(call);
        if call.batch.is_some() {
            let name = format!("w{}", self.next_name());
            self.b.weight(&name, ty)
        } else {
            self.tensor(d, ty, stream)
        }
    }

    /// Its type.
    fn held(&self, call: &Call) -> Type {
        let mut ty = Type::new(call.dtype, SHAPES[call.shape]);
        let Held::Pieces { axis, ways, dim, uneven } = call.held else { return ty };
        let mut on = self.even((axis, ways), dim, ty.shape[dim]);
        if uneven {
            (ty.shape[dim], on) = self.uneven((axis, ways), dim);
        }
        ty.on(axis, on)
    }

    /// Number of pieces of a dim over an axis or blocks of it.
    fn parts(&self, (axis, ways): Over) -> u32 {
        ways.unwrap_or(self.mesh.size(axis))
    }

    /// Pieces of one length along a dim.
    fn even(&self, over: Over, dim: usize, local: u64) -> AxisLayout {
        let parts = self.parts(over);
        Shard::of(dim, local * u64::from(parts), 1, parts)
            .map_or(AxisLayout::Replicated, |s| AxisLayout::Shard(s.over(over.1)))
    }

    /// Pieces of [`UNEVEN`], and how long this rank's is.
    fn uneven(&self, over: Over, dim: usize) -> (u64, AxisLayout) {
        let parts = self.parts(over);
        let Some(s) = Shard::of(dim, UNEVEN, 1, parts) else { return (UNEVEN, AxisLayout::Replicated) };
        let at = self.coord[over.0 as usize] % parts;
        (s.range(0, parts, at).1, AxisLayout::Shard(s.over(over.1)))
    }

    /// Terms of a sum over an axis or over each block of it.
    fn partial(&mut self, d: &mut Dice, over: Over, shape: [u64; 2], dtype: DType, tree: bool) -> ValueId {
        let on = self.even(over, 1, 4);
        let term = |l: &mut Self, rows| {
            let name = format!("w{}", l.next_name());
            l.b.weight(&name, Type::new(dtype, [rows, 4]).on(over.0, on))
        };
        let (x, w) = (term(self, shape[0]), term(self, shape[1]));
        if tree {
            self.b.attr("segments", 2i64);
        }
        let stream = d.below(self.streams);
        self.b.stream(STREAMS[stream]);
        let op = self.b.program().ops.len();
        let v = self.b.op(Opcode::Matmul, &[x, w]);
        self.made.push((v, stream, op));
        v
    }

    /// Something that was made before, rows of a cache, an input or a weight.
    fn tensor(&mut self, d: &mut Dice, ty: Type, stream: usize) -> ValueId {
        let known: Vec<ValueId> = self.made.iter().map(|m| m.0).filter(|v| *self.b.ty(*v) == ty).collect();
        match d.below(5) {
            0 | 3 if ty.layout.is_replicated() => {
                let buffer = self.cache(ty);
                self.read(d, buffer, stream)
            }
            1 | 2 if !known.is_empty() => d.pick(&known),
            4 if ty.layout.is_replicated() => {
                let name = format!("x.{}.{:?}", ty.dtype, ty.shape);
                self.b.input(&name, ty)
            }
            _ => {
                let name = format!("w{}", self.next_name());
                self.b.weight(&name, ty)
            }
        }
    }

    /// Writes the first half of a cache.
    fn write(&mut self, buffer: BufferId, v: ValueId, stream: usize) {
        // A collective in flight may still read the rows, and nothing may read them later.
        self.wait_all();
        let stale: Vec<ValueId> =
            self.made.iter().map(|m| m.0).filter(|v| self.viewed(*v) == Some(buffer)).collect();
        self.made.retain(|m| !stale.contains(&m.0));
        self.events(stream, &[v], Some((buffer, true)));
        self.b.stream(STREAMS[stream]);
        self.touched.push((buffer, stream, self.b.program().ops.len(), true));
        self.b.write(buffer, v);
    }

    /// A view of one half of a cache.
    fn read(&mut self, d: &mut Dice, buffer: BufferId, stream: usize) -> ValueId {
        self.events(stream, &[], Some((buffer, false)));
        let rows = self.b.program().buffer(buffer).ty.shape[0] / 2;
        let row = if d.chance(2, 3) { 0 } else { rows };
        self.b.stream(STREAMS[stream]).attr("row", row).attr("rows", rows);
        let op = self.b.program().ops.len();
        self.touched.push((buffer, stream, op, false));
        let v = self.b.read(buffer);
        self.made.push((v, stream, op));
        v
    }

    /// Puts events into the next op's `after(…)`: after the makers of its operands on other streams, and after the
    /// accesses of a buffer that it must not overtake.
    fn events(&mut self, stream: usize, operands: &[ValueId], buffer: Option<(BufferId, bool)>) {
        let makers = self.made.iter().filter(|m| operands.contains(&m.0)).map(|m| (m.1, m.2));
        let accesses =
            self.touched.iter().filter(|t| buffer.is_some_and(|(b, writes)| t.0 == b && (writes || t.3)));
        let mut needs: Vec<(usize, usize)> = makers.chain(accesses.map(|t| (t.1, t.2))).collect();
        needs.retain(|n| n.0 != stream && n.1 >= self.edge);
        needs.sort_by_key(|n| std::cmp::Reverse(n.1));
        let mut after: Vec<ValueId> = Vec::new();
        let mut seen = Vec::new();
        for (on, op) in needs {
            // The latest need of a stream covers the earlier ones.
            if seen.contains(&on) {
                continue;
            }
            seen.push(on);
            let known = self.events.iter().rev().find(|e| e.0 == on && e.1 > op).map(|e| e.2);
            after.push(known.unwrap_or_else(|| {
                self.b.stream(STREAMS[on]);
                let at = self.b.program().ops.len();
                let e = self.b.op(Opcode::EventRecord, &[]);
                self.events.push((on, at, e));
                e
            }));
        }
        for e in after {
            self.b.after(e);
        }
    }

    fn view_used(&mut self, operands: &[ValueId], stream: usize, op: usize) {
        let buffers: Vec<BufferId> = operands.iter().filter_map(|v| self.viewed(*v)).collect();
        self.touched.extend(buffers.into_iter().map(|b| (b, stream, op, false)));
    }

    /// The buffer that a value is a view of.
    fn viewed(&self, v: ValueId) -> Option<BufferId> {
        self.b.program().ops.iter().find(|o| o.results.contains(&v))?.buffer
    }

    fn next_name(&mut self) -> usize {
        self.names += 1;
        self.names
    }
}
