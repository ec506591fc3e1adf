//! Lowers one rank's list of collectives to a typed program: operands with the required layouts,
//! streams, and the necessary events.

use tessera_ir::{Attr, BufferId, Builder, DType, Op, Opcode, Program, Type, ValueId};
use tessera_mesh::{Axis, AxisLayout, Group, Mesh, Rank, Shard};

use crate::planned_call::{CollectiveSpec, PlannedCall, SHAPES, UnevenDim, ValueSharding};
use crate::rewrite::fuse_wait;
use tessera_base::random::Rng;

const STREAMS: [&str; 3] = ["compute", "comm", "io"];
/// An extent that 2, 3 and 4 ranks shard unevenly.
const UNEVEN: u64 = 7;

/// An axis, and the number of positions per subgroup; `None` for the whole axis.
type AxisSpan = (Axis, Option<u32>);

/// Properties that all ranks of a set share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SetStyle {
    /// Streams of each program, at most three.
    pub(crate) streams: usize,
    /// Whether ranks with equal lists of calls get equal programs.
    pub(crate) share_programs: bool,
}

/// Lowers one rank's calls to its program. The error lists what the IR rules rejected.
pub(crate) fn lower_rank(
    mesh: &Mesh,
    rank: usize,
    style: SetStyle,
    calls: &[PlannedCall],
) -> Result<Program, String> {
    let streams = style.streams;
    let coord = mesh.coord_of(Rank(rank as u32));
    let at: Vec<String> = if mesh.contains(Rank(rank as u32)) {
        mesh.active_axes().map(|a| format!("@{a}{}", coord.on_axis(a))).collect()
    } else {
        vec![format!("@out{rank}")]
    };
    let role = format!("r{rank}{}", at.concat());
    let mut l = ProgramLowering {
        builder: Builder::new_role("denoise", &role, *mesh, &STREAMS[..streams]),
        mesh,
        streams,
        coord: coord.0,
        names: 0,
        computed: Vec::new(),
        accesses: Vec::new(),
        events: Vec::new(),
        open: Vec::new(),
        blocking: Vec::new(),
        batch: None,
        batch_stream: None,
        graph: None,
        graph_start: 0,
        captured: Vec::new(),
        ordered_before: 0,
    };
    for (i, call) in calls.iter().enumerate() {
        let repeats = calls[..i].iter().filter(|c| c.salt == call.salt).count();
        let who = if style.share_programs { u32::MAX } else { rank as u32 };
        let mut d = Rng::new(u64::from(call.salt), [who, repeats as u32]);
        l.emit_call(&mut d, call);
    }
    l.wait_all();
    l.leave_graph();
    let mut p = l.builder.finish().map_err(|e| format!("{e:?}"))?;
    for (first, end, number) in &l.captured {
        let given = |o: &Op| matches!(o.opcode, Opcode::Input | Opcode::Call | Opcode::Weight);
        for op in p.ops[*first..*end].iter_mut().filter(|o| !given(o)) {
            op.attrs.insert("graph".to_string(), Attr::Str(format!("g{number}")));
        }
    }
    for issue in l.blocking.iter().rev() {
        fuse_wait(&mut p, *issue);
    }
    Ok(p)
}

struct ProgramLowering<'a> {
    builder: Builder,
    mesh: &'a Mesh,
    streams: usize,
    coord: [u32; 4],
    names: usize,
    /// Computed values (sources excluded), each with its stream and op.
    computed: Vec<(ValueId, usize, usize)>,
    /// Buffer accesses: buffer, stream, op, and whether the access writes.
    accesses: Vec<(BufferId, usize, usize, bool)>,
    /// Recorded events: stream, op, value.
    events: Vec<(usize, usize, ValueId)>,
    /// Issued collectives that have no wait yet.
    open: Vec<OpenIssue>,
    /// Issues that will be merged with the wait behind them.
    blocking: Vec<usize>,
    /// Batch of the previous call, and its stream.
    batch: Option<u32>,
    batch_stream: Option<usize>,
    /// The open captured graph, and its first op.
    graph: Option<u32>,
    graph_start: usize,
    /// Op ranges of closed graphs: first, end, number.
    captured: Vec<(usize, usize, u32)>,
    /// Index of the first op for which an event may be necessary: every stream already runs after
    /// all ops before it.
    ordered_before: usize,
}

struct OpenIssue {
    ticket: ValueId,
    ty: Option<Type>,
    /// Calls until the wait; `usize::MAX` while its batch may continue.
    due: usize,
    stream: usize,
}

impl ProgramLowering<'_> {
    fn emit_call(&mut self, d: &mut Rng, call: &PlannedCall) {
        // Members of a batch are one launch: nothing may come between them on their streams.
        let batched = call.batch.is_some();
        if call.graph != self.graph {
            self.enter_graph(d, call.graph);
        }
        let goes_on = batched && self.batch == call.batch && self.batch_stream.is_some();
        if !goes_on {
            self.open.iter_mut().filter(|o| o.due == usize::MAX).for_each(|o| o.due = 1 + d.next_below(3));
            self.wait_due();
        }
        self.batch = call.batch;
        let stream = self.batch_stream.filter(|_| goes_on).unwrap_or(d.next_below(self.streams));
        self.batch_stream = batched.then_some(stream);
        let mut operands = Vec::new();
        if !matches!(call.collective, CollectiveSpec::Recv { .. }) {
            operands.push(self.make_operand(d, call, stream));
        }
        self.add_events(stream, &operands, None);
        let opcode = self.set_collective_attrs(call);
        self.builder.set_stream(STREAMS[stream]);
        let op = self.builder.program().ops.len();
        let (ticket, ty) = match opcode {
            Opcode::Recv => {
                let ty = self.moved_type(call);
                (self.builder.add_recv(ty.clone()), Some(ty))
            }
            _ => (self.builder.add_issue(opcode, &operands), None),
        };
        self.note_view_use(&operands, stream, op);
        let blocks = !batched && d.next_ratio(2, 5);
        let (due, wait) =
            if blocks { (0, stream) } else { (1 + d.next_below(3), d.next_below(self.streams)) };
        let due = if batched { usize::MAX } else { due };
        self.open.push(OpenIssue { ticket, ty, due, stream: wait });
        if blocks {
            self.blocking.push(op);
            let last = self.open.len() - 1;
            self.emit_wait(last);
        }
        if !batched {
            (0..2).for_each(|_| self.emit_compute(d));
        }
    }

    /// Sets the attributes of a call's collective for the next op and returns its opcode.
    fn set_collective_attrs(&mut self, call: &PlannedCall) -> Opcode {
        let (axis, subgroup_size) = match call.group {
            Group::World => ("world", None),
            Group::Axis { axis, subgroup_size } => (axis.name(), subgroup_size),
        };
        let b = self.builder.set_attr("axis", axis);
        if let Some(w) = subgroup_size {
            b.set_attr("group_size", i64::from(w));
        }
        if let Some(n) = call.batch {
            b.set_attr("batch", i64::from(n));
        }
        let reduction = |tree| if tree { "tree" } else { "sum" };
        match call.collective {
            CollectiveSpec::AllReduce { tree } => {
                b.set_attr("reduction", reduction(tree));
                Opcode::AllReduce
            }
            CollectiveSpec::AllGather { dim } => {
                b.set_attr("dim", dim as i64);
                Opcode::AllGather
            }
            CollectiveSpec::ReduceScatter { dim, tree } => {
                b.set_attr("dim", dim as i64).set_attr("reduction", reduction(tree));
                Opcode::ReduceScatter
            }
            CollectiveSpec::AllToAll { concat, .. } => {
                b.set_attr("concat", concat as i64).set_attr("split", 1 - concat as i64);
                Opcode::AllToAll
            }
            CollectiveSpec::Broadcast { root } => {
                b.set_attr("root", root as i64);
                Opcode::Broadcast
            }
            CollectiveSpec::Send { to } => {
                b.set_attr("to", to as i64);
                Opcode::Send
            }
            CollectiveSpec::Recv { from } => {
                b.set_attr("from", from as i64);
                Opcode::Recv
            }
        }
    }

    /// Closes the open graph, and opens another if given. Tickets and events must not cross a graph
    /// boundary, so all streams are joined there.
    fn enter_graph(&mut self, d: &mut Rng, graph: Option<u32>) {
        self.wait_all();
        self.leave_graph();
        let record = |l: &mut Self, stream: usize, after: &[ValueId]| {
            for e in after {
                l.builder.start_after(*e);
            }
            l.builder.set_stream(STREAMS[stream]);
            l.builder.add_op(Opcode::EventRecord, &[])
        };
        let others: Vec<ValueId> = (1..self.streams).map(|s| record(self, s, &[])).collect();
        let all = record(self, 0, &others);
        // Inside a graph, lanes of other streams begin with the graph in any case.
        if graph.is_none() || d.next_ratio(1, 2) {
            for s in 1..self.streams {
                record(self, s, &[all]);
            }
        }
        self.events.clear();
        self.ordered_before = self.builder.program().ops.len();
        self.graph = graph;
        self.graph_start = self.ordered_before;
        self.batch_stream = None;
        if graph.is_some() {
            // The graph is launched on the stream of its first op.
            record(self, 0, &[]);
        }
    }

    fn leave_graph(&mut self) {
        if let Some(number) = self.graph.take() {
            self.captured.push((self.graph_start, self.builder.program().ops.len(), number));
        }
    }

    /// Emits the waits that are due before the next call.
    fn wait_due(&mut self) {
        for i in (0..self.open.len()).rev() {
            self.open[i].due = self.open[i].due.saturating_sub(1);
            if self.open[i].due == 0 {
                self.emit_wait(i);
            }
        }
    }

    fn wait_all(&mut self) {
        while !self.open.is_empty() {
            self.emit_wait(0);
        }
    }

    fn emit_wait(&mut self, open: usize) {
        let o = self.open.remove(open);
        self.builder.set_stream(STREAMS[o.stream]);
        let op = self.builder.program().ops.len();
        if let Some(v) = self.builder.add_wait(o.ticket, o.ty) {
            self.computed.push((v, o.stream, op));
        }
    }

    /// Sometimes emits an op that reads a computed value: arithmetic, an output, or a cache write.
    fn emit_compute(&mut self, d: &mut Rng) {
        if self.computed.is_empty() || d.next_ratio(1, 2) {
            return;
        }
        let (v, ..) = self.computed[d.next_below(self.computed.len())];
        if self.builder.type_of(v).layout.partial_axis().is_some() {
            return;
        }
        let stream = if d.next_ratio(2, 3) { 0 } else { d.next_below(self.streams) };
        match d.next_below(6) {
            0 => {
                self.add_events(stream, &[v], None);
                self.builder.set_stream(STREAMS[stream]);
                let name = format!("y{}", self.next_name());
                let op = self.builder.program().ops.len();
                self.builder.add_output(&name, v);
                self.note_view_use(&[v], stream, op);
            }
            1 | 2 if self.builder.type_of(v).layout.is_replicated() && self.viewed_buffer(v).is_none() => {
                let buffer = self.declare_cache(self.builder.type_of(v).clone());
                self.write_cache(buffer, v, stream);
            }
            3 if !self.accesses.is_empty() => {
                let buffer = self.accesses[d.next_below(self.accesses.len())].0;
                let mut ty = self.builder.program().buffer(buffer).ty.clone();
                ty.shape[0] /= 2;
                let name = format!("w{}", self.next_name());
                let w = self.builder.add_weight(&name, ty);
                self.write_cache(buffer, w, stream);
            }
            4 if !self.accesses.is_empty() => {
                let buffer = self.accesses[d.next_below(self.accesses.len())].0;
                self.read_cache(d, buffer, stream);
            }
            _ => {
                let with = if d.next_ratio(1, 2) { vec![v, v] } else { vec![v] };
                self.add_events(stream, &with, None);
                self.builder.set_stream(STREAMS[stream]);
                let op = self.builder.program().ops.len();
                let y = self.builder.add_op(if with.len() == 2 { Opcode::Add } else { Opcode::Silu }, &with);
                self.note_view_use(&with, stream, op);
                self.computed.push((y, stream, op));
            }
        }
    }

    /// Declares a cache with twice the rows of a value.
    fn declare_cache(&mut self, mut ty: Type) -> BufferId {
        let name = format!("kv.{}.{}x{}", ty.dtype, ty.shape[0], ty.shape[1]);
        ty.shape[0] *= 2;
        self.builder.declare_buffer(&name, ty)
    }

    /// Returns a value with the layout that the call requires.
    fn make_operand(&mut self, d: &mut Rng, call: &PlannedCall, stream: usize) -> ValueId {
        let shape = SHAPES[call.shape];
        let whole = Type::new(call.dtype, shape);
        let Group::Axis { axis, subgroup_size } = call.group else {
            return match call.collective {
                CollectiveSpec::AllReduce { tree } => {
                    let axis = self.mesh.active_axes().next().unwrap_or(Axis::Tp);
                    self.emit_partial(d, (axis, None), shape, call.dtype, tree)
                }
                _ => self.moved_value(d, call, stream),
            };
        };
        let even = |dim: usize| self.even_shards((axis, subgroup_size), dim, shape[dim]);
        match call.collective {
            CollectiveSpec::AllReduce { tree } | CollectiveSpec::ReduceScatter { tree, .. } => {
                self.emit_partial(d, (axis, subgroup_size), shape, call.dtype, tree)
            }
            CollectiveSpec::AllGather { dim } => {
                self.pick_tensor(d, whole.with_axis_layout(axis, even(dim)), stream)
            }
            CollectiveSpec::AllToAll { concat, cut } => {
                let mut ty = whole;
                let mut on = even(concat);
                match cut {
                    UnevenDim::Even => {}
                    UnevenDim::Concat => {
                        (ty.shape[concat], on) = self.uneven_shards((axis, subgroup_size), concat)
                    }
                    UnevenDim::Split => ty.shape[1 - concat] = UNEVEN,
                }
                self.pick_tensor(d, ty.with_axis_layout(axis, on), stream)
            }
            _ => self.moved_value(d, call, stream),
        }
    }

    /// Returns the operand of a broadcast or a send.
    fn moved_value(&mut self, d: &mut Rng, call: &PlannedCall, stream: usize) -> ValueId {
        let ty = self.moved_type(call);
        if call.batch.is_some() {
            let name = format!("w{}", self.next_name());
            self.builder.add_weight(&name, ty)
        } else {
            self.pick_tensor(d, ty, stream)
        }
    }

    /// Returns the type of the value that a broadcast, send or receive moves.
    fn moved_type(&self, call: &PlannedCall) -> Type {
        let mut ty = Type::new(call.dtype, SHAPES[call.shape]);
        let ValueSharding::Shards { axis, subgroup_size, dim, uneven } = call.sharding else { return ty };
        let mut on = self.even_shards((axis, subgroup_size), dim, ty.shape[dim]);
        if uneven {
            (ty.shape[dim], on) = self.uneven_shards((axis, subgroup_size), dim);
        }
        ty.with_axis_layout(axis, on)
    }

    /// Returns the number of shards of a dim over an axis or its subgroups.
    fn shard_count(&self, (axis, subgroup_size): AxisSpan) -> u32 {
        subgroup_size.unwrap_or(self.mesh.axis_size(axis))
    }

    /// Returns the layout of equal shards along a dim.
    fn even_shards(&self, over: AxisSpan, dim: usize, local: u64) -> AxisLayout {
        let parts = self.shard_count(over);
        Shard::new(dim, local * u64::from(parts), 1, parts)
            .map_or(AxisLayout::Replicated, |s| AxisLayout::Shard(s.with_subgroup_size(over.1)))
    }

    /// Returns the length of this rank's shard of [`UNEVEN`], and the layout.
    fn uneven_shards(&self, over: AxisSpan, dim: usize) -> (u64, AxisLayout) {
        let parts = self.shard_count(over);
        let Some(s) = Shard::new(dim, UNEVEN, 1, parts) else { return (UNEVEN, AxisLayout::Replicated) };
        let at = self.coord[over.0 as usize] % parts;
        (s.global_range(0, parts, at).1, AxisLayout::Shard(s.with_subgroup_size(over.1)))
    }

    /// Emits a partial value over an axis or over each of its subgroups.
    fn emit_partial(
        &mut self,
        d: &mut Rng,
        over: AxisSpan,
        shape: [u64; 2],
        dtype: DType,
        tree: bool,
    ) -> ValueId {
        let on = self.even_shards(over, 1, 4);
        let term = |l: &mut Self, rows| {
            let name = format!("w{}", l.next_name());
            l.builder.add_weight(&name, Type::new(dtype, [rows, 4]).with_axis_layout(over.0, on))
        };
        let (x, w) = (term(self, shape[0]), term(self, shape[1]));
        if tree {
            self.builder.set_attr("segments", 2i64);
        }
        let stream = d.next_below(self.streams);
        self.builder.set_stream(STREAMS[stream]);
        let op = self.builder.program().ops.len();
        let v = self.builder.add_op(Opcode::Matmul, &[x, w]);
        self.computed.push((v, stream, op));
        v
    }

    /// Returns an existing value, rows of a cache, an input or a weight.
    fn pick_tensor(&mut self, d: &mut Rng, ty: Type, stream: usize) -> ValueId {
        let known: Vec<ValueId> =
            self.computed.iter().map(|m| m.0).filter(|v| *self.builder.type_of(*v) == ty).collect();
        match d.next_below(5) {
            0 | 3 if ty.layout.is_replicated() => {
                let buffer = self.declare_cache(ty);
                self.read_cache(d, buffer, stream)
            }
            1 | 2 if !known.is_empty() => d.pick_one(&known),
            4 if ty.layout.is_replicated() => {
                let name = format!("x.{}.{:?}", ty.dtype, ty.shape);
                self.builder.add_input(&name, ty)
            }
            _ => {
                let name = format!("w{}", self.next_name());
                self.builder.add_weight(&name, ty)
            }
        }
    }

    /// Writes the first half of a cache.
    fn write_cache(&mut self, buffer: BufferId, v: ValueId, stream: usize) {
        // A collective in flight may still read the rows, and nothing may read them later.
        self.wait_all();
        let stale: Vec<ValueId> =
            self.computed.iter().map(|m| m.0).filter(|v| self.viewed_buffer(*v) == Some(buffer)).collect();
        self.computed.retain(|m| !stale.contains(&m.0));
        self.add_events(stream, &[v], Some((buffer, true)));
        self.builder.set_stream(STREAMS[stream]);
        self.accesses.push((buffer, stream, self.builder.program().ops.len(), true));
        self.builder.write_buffer(buffer, v);
    }

    /// Returns a view of one half of a cache.
    fn read_cache(&mut self, d: &mut Rng, buffer: BufferId, stream: usize) -> ValueId {
        self.add_events(stream, &[], Some((buffer, false)));
        let rows = self.builder.program().buffer(buffer).ty.shape[0] / 2;
        let row = if d.next_ratio(2, 3) { 0 } else { rows };
        self.builder.set_stream(STREAMS[stream]).set_attr("row", row).set_attr("rows", rows);
        let op = self.builder.program().ops.len();
        self.accesses.push((buffer, stream, op, false));
        let v = self.builder.read_buffer(buffer);
        self.computed.push((v, stream, op));
        v
    }

    /// Adds events to the next op's `after(…)`: after the producers of its operands on other
    /// streams, and after the buffer accesses that it must not overtake.
    fn add_events(&mut self, stream: usize, operands: &[ValueId], buffer: Option<(BufferId, bool)>) {
        let makers = self.computed.iter().filter(|m| operands.contains(&m.0)).map(|m| (m.1, m.2));
        let accesses =
            self.accesses.iter().filter(|t| buffer.is_some_and(|(b, writes)| t.0 == b && (writes || t.3)));
        let mut needs: Vec<(usize, usize)> = makers.chain(accesses.map(|t| (t.1, t.2))).collect();
        needs.retain(|n| n.0 != stream && n.1 >= self.ordered_before);
        needs.sort_by_key(|n| std::cmp::Reverse(n.1));
        let mut after: Vec<ValueId> = Vec::new();
        let mut seen = Vec::new();
        for (on, op) in needs {
            // The latest dependency on a stream covers the earlier ones.
            if seen.contains(&on) {
                continue;
            }
            seen.push(on);
            let known = self.events.iter().rev().find(|e| e.0 == on && e.1 > op).map(|e| e.2);
            after.push(known.unwrap_or_else(|| {
                self.builder.set_stream(STREAMS[on]);
                let at = self.builder.program().ops.len();
                let e = self.builder.add_op(Opcode::EventRecord, &[]);
                self.events.push((on, at, e));
                e
            }));
        }
        for e in after {
            self.builder.start_after(e);
        }
    }

    fn note_view_use(&mut self, operands: &[ValueId], stream: usize, op: usize) {
        let buffers: Vec<BufferId> = operands.iter().filter_map(|v| self.viewed_buffer(*v)).collect();
        self.accesses.extend(buffers.into_iter().map(|b| (b, stream, op, false)));
    }

    /// Returns the buffer that a value is a view of.
    fn viewed_buffer(&self, v: ValueId) -> Option<BufferId> {
        self.builder.program().ops.iter().find(|o| o.results.contains(&v))?.buffer
    }

    fn next_name(&mut self) -> usize {
        self.names += 1;
        self.names
    }
}
