//! Plans of array programs, their arrays, and what they compute by definition.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera::Mapping;
use tessera::arrays::{ArrayPlan, ArrayTrace, ArrayTraceEvent, ArrayTraceKind, HostArray, StreamIds};
use tessera_base::Diagnostics;
use tessera_ir::{Bundle, Phase, Program, RoleRanks, parse_all};
use tessera_mesh::{Mesh, RankMap, split_units};
use tessera_plan::assign_slots;

pub type Arrays = BTreeMap<String, HostArray>;

/// Parses the programs of all roles into a bundle with one call for each program.
pub fn bundle(text: &str) -> Bundle {
    let programs = parse_all(text, "test").unwrap_or_else(|ds| panic!("{ds:#?}"));
    let mesh = programs[0].mesh;
    let mut names: Vec<String> = Vec::new();
    for p in &programs {
        if !names.contains(&p.name) {
            names.push(p.name.clone());
        }
    }
    let roles: Vec<&str> = programs.iter().filter(|p| p.name == names[0]).map(|p| p.role.as_str()).collect();
    let phase = |name: &String| {
        let programs: Vec<Program> = programs.iter().filter(|p| p.name == *name).cloned().collect();
        Phase { name: name.clone(), slots: programs.iter().map(assign_slots).collect(), programs }
    };
    Bundle {
        mesh,
        rank_map: RankMap::from_device_kind(&mesh, "cpu"),
        hosts: None,
        roles: RoleRanks::assign_by_name(&mesh, &roles),
        phases: names.iter().map(phase).collect(),
        calls: names.iter().map(|name| (name.clone(), vec![name.clone()])).collect(),
        mapping: String::new(),
    }
}

pub fn mapping(mesh: &Mesh) -> Mapping {
    Mapping { mesh: *mesh, ..Mapping::default() }
}

/// Seals the programs of a text.
pub fn seal_text(text: &str) -> Result<Arc<ArrayPlan>, Diagnostics> {
    let bundle = bundle(text);
    let mapping = mapping(&bundle.mesh);
    ArrayPlan::new(bundle, &mapping).map(Arc::new)
}

/// The extents of the cases: rows, columns and results of a linear layer, and elements of a vector.
#[derive(Debug, Clone, Copy)]
pub struct Extents {
    pub mesh: [u64; 2],
    pub rows: u64,
    pub columns: u64,
    pub results: u64,
    pub elements: u64,
}

/// Even shards over tp alone, and uneven ones over both axes.
pub const CASES: [Extents; 2] = [
    Extents { mesh: [2, 1], rows: 3, columns: 6, results: 4, elements: 10 },
    Extents { mesh: [2, 3], rows: 7, columns: 5, results: 3, elements: 9 },
];

impl Extents {
    /// Returns the programs of all roles. `linear` shards its columns over tp and its rows over ep, so that its output is
    /// sharded over ep alone; `gather` returns a shard over tp, and the whole.
    pub fn to_text(self) -> String {
        self.text_of(&["linear", "gather"])
    }

    /// Returns some of the programs of all roles.
    pub fn text_of(self, names: &[&str]) -> String {
        let [tp, ep] = self.mesh;
        let mesh = if ep == 1 { format!("tp={tp}") } else { format!("tp={tp},ep={ep}") };
        let part = |extent: u64, parts: u64, at: u64| split_units(extent, parts as u32, at as u32).1;
        let layout = |axis: &str, dim: u64, extent: u64, parts: u64| match (parts, extent % parts) {
            (1, _) => String::new(),
            (_, 0) => format!("{axis}: shard({dim})"),
            _ => format!("{axis}: shard({dim}, extent={extent}, unit=1)"),
        };
        let braces = |layouts: [String; 2]| {
            let layouts: Vec<String> = layouts.into_iter().filter(|l| !l.is_empty()).collect();
            if layouts.is_empty() { String::new() } else { format!(" {{{}}}", layouts.join(", ")) }
        };
        let mut text = String::new();
        for name in names {
            for (t, e) in (0..tp).flat_map(|t| (0..ep).map(move |e| (t, e))) {
                let role = if ep == 1 { format!("r@tp{t}") } else { format!("r@tp{t}@ep{e}") };
                text += &format!("program @{name} role({role}) mesh({mesh}) {{\n");
                let (m, k, n) = (part(self.rows, ep, e), part(self.columns, tp, t), self.results);
                let rows = || layout("ep", 0, self.rows, ep);
                let columns = || layout("tp", 1, self.columns, tp);
                let len = part(self.elements, tp, t);
                let of_vector = braces([layout("tp", 0, self.elements, tp), String::new()]);
                text += &match *name {
                    "linear" => format!(
                        "  %x = input : f32[{m}, {k}]{}\n  %w = weight \"w\" : f32[{n}, {k}]{}\n  %b = weight \"b\" : f32[{n}]\n  \
%p = ttile.matmul %x, %w : f32[{m}, {n}]{}\n  %s = ttile.collective.all_reduce %p {{axis = \"tp\", reduction = \"sum\"}}\n  \
%y = ttile.bias_act %s, %b {{act = \"silu\"}}\n  output \"y\", %y\n}}\n",
                        braces([columns(), rows()]),
                        braces([columns(), String::new()]),
                        braces(["tp: partial(sum)".to_string(), rows()]),
                    ),
                    _ => format!(
                        "  %x = input : f32[{len}, 1]{of_vector}\n  %y = ttile.silu %x\n  output \"shards\", %y\n{}  \
output \"whole\", %g\n}}\n",
                        self.gather_text(),
                    ),
                };
            }
        }
        text
    }

    /// Gathers `%y`; uneven shards are padded first.
    fn gather_text(self) -> String {
        let tp = self.mesh[0];
        if self.elements.is_multiple_of(tp) {
            return "  %g = ttile.collective.all_gather %y {axis = \"tp\", dim = 0}\n".to_string();
        }
        let (extent, rows) = (self.elements, self.elements.div_ceil(tp));
        format!(
            "  %q = ttile.pad %y {{axis = \"tp\", dim = 0, rows = {rows}}}\n  \
%h = ttile.collective.all_gather %q {{axis = \"tp\", dim = 0}}\n  \
%g = ttile.compact %h {{extent = {extent}, parts = {tp}, unit = 1}}\n"
        )
    }

    pub fn weights(self) -> Arrays {
        let array = |seed, shape: &[u64]| numbers(seed, shape);
        BTreeMap::from([
            ("w".to_string(), array(1, &[self.results, self.columns])),
            ("b".to_string(), array(2, &[self.results])),
        ])
    }

    /// Returns the inputs of a program; each seed has others.
    pub fn inputs(self, program: &str, seed: u64) -> Arrays {
        let shape = match program {
            "linear" => vec![self.rows, self.columns],
            _ => vec![self.elements, 1],
        };
        BTreeMap::from([("x".to_string(), numbers(10 + seed, &shape))])
    }

    /// Computes the outputs of a program in f64.
    pub fn expected(self, program: &str, inputs: &Arrays) -> BTreeMap<String, Vec<f64>> {
        let silu = |v: f64| v / (1.0 + (-v).exp());
        let values = |array: &HostArray| array.values().iter().map(|v| f64::from(*v)).collect::<Vec<_>>();
        let x = values(&inputs["x"]);
        if program == "gather" {
            let y: Vec<f64> = x.into_iter().map(silu).collect();
            return BTreeMap::from([("shards".to_string(), y.clone()), ("whole".to_string(), y)]);
        }
        let weights = self.weights();
        let (w, b) = (values(&weights["w"]), values(&weights["b"]));
        let k = self.columns as usize;
        let y = x.chunks(k).flat_map(|row| {
            w.chunks(k)
                .zip(&b)
                .map(move |(w, b)| silu(row.iter().zip(w).map(|(x, w)| x * w).sum::<f64>() + b))
        });
        BTreeMap::from([("y".to_string(), y.collect())])
    }
}

/// Returns numbers between −1 and 1 that depend on a seed.
pub fn numbers(seed: u64, shape: &[u64]) -> HostArray {
    let count = shape.iter().product::<u64>();
    let value = |i: u64| ((i + 1) * (2 * seed + 13) * 7919 % 2003) as f32 / 1001.5 - 1.0;
    HostArray::from_vec(shape.to_vec(), (0..count).map(value).collect())
}

pub fn assert_close(outputs: &Arrays, expected: &BTreeMap<String, Vec<f64>>) {
    assert!(outputs.keys().eq(expected.keys()), "{outputs:?}");
    for (name, array) in outputs {
        let expected = &expected[name];
        assert_eq!(array.values().len(), expected.len(), "{name}");
        for (i, (a, b)) in array.values().iter().zip(expected).enumerate() {
            assert!((f64::from(*a) - b).abs() < 2e-6, "{name}[{i}]: {a}, expected {b}");
        }
    }
}

/// A program that multiplies its input by a weight, so that large inputs give infinite outputs.
pub const MATMUL_TEXT: &str = r#"
program @matmul role(r) mesh(tp=2) {
  %x = input : f32[2, 3]
  %w = weight "w" : f32[2, 3] {tp: shard(0)}
  %y = ttile.matmul %x, %w
  output "y", %y
}
"#;

/// Returns the weight and the input of [`MATMUL_TEXT`], of which each is one number.
pub fn matmul_arrays(weight: f32, input: f32) -> [Arrays; 2] {
    let array = |name: &str, shape: [u64; 2], value: f32| {
        let count = shape.iter().product::<u64>() as usize;
        BTreeMap::from([(name.to_string(), HostArray::from_vec(shape.to_vec(), vec![value; count]))])
    };
    [array("w", [4, 3], weight), array("x", [2, 3], input)]
}

/// A program whose two collectives, on two streams, are in flight at once, with one op that computes between.
pub const OVERLAP_TEXT: &str = r#"
program @overlap role(r) mesh(tp=2) streams(compute, tp_collective, a2a) {
  %x = input : f32[4, 3] {tp: shard(0)}
  %e = event.record
  %t = ttile.collective.issue all_gather %x {axis = "tp", dim = 0} @tp_collective after(%e)
  %u = ttile.collective.issue all_gather %x {axis = "tp", dim = 0} @a2a after(%e)
  %s = ttile.silu %x
  %a = ttile.collective.wait %t : f32[8, 3]
  %b = ttile.collective.wait %u : f32[8, 3]
  %y = ttile.add %a, %b
  output "y", %y
  output "s", %s
}
"#;

pub fn overlap_inputs() -> Arrays {
    BTreeMap::from([("x".to_string(), numbers(3, &[8, 3]))])
}

/// Checks the trace of `calls` calls of [`OVERLAP_TEXT`]: on each rank the same events in the order of the plan, and
/// nothing of one call within another one.
pub fn assert_overlap_trace(trace: &ArrayTrace, calls: u64) {
    use ArrayTraceKind::{Compute, InFlight, Issue, Wait};
    let expected = [
        (Issue, "all_gather", "tp_collective", 7, Some(2)),
        (InFlight, "all_gather", "tp_collective", 7, Some(2)),
        (Issue, "all_gather", "a2a", 2, Some(3)),
        (InFlight, "all_gather", "a2a", 2, Some(3)),
        (Compute, "silu", "compute", 0, None),
        (Wait, "all_gather", "compute", 0, Some(2)),
        (Wait, "all_gather", "compute", 0, Some(3)),
        (Compute, "add", "compute", 0, None),
        (Compute, "output", "compute", 0, None),
        (Compute, "output", "compute", 0, None),
    ];
    assert_eq!((trace.record.call_count, trace.record.ranks), (calls, 2));
    assert!(trace.events.is_sorted_by_key(|event| event.start_ns));
    for (rank, call) in (0..2).flat_map(|rank| (1..=calls).map(move |call| (rank, call))) {
        let of_call = |event: &&ArrayTraceEvent| event.rank == rank && event.call == call;
        let events: Vec<&ArrayTraceEvent> = trace.events.iter().filter(of_call).collect();
        let shown: Vec<_> =
            events.iter().map(|e| (e.kind, e.op, &*e.stream, e.stream_id, e.issued_by)).collect();
        assert_eq!(shown, expected);
        // Both collectives are issued before either is complete, and the op between them is over by then.
        let in_flight = [events[1], events[3]];
        assert!(in_flight[1].start_ns <= events[4].start_ns && events[4].end_ns <= in_flight[0].end_ns);
        assert_eq!(in_flight.map(|e| e.end_ns), [events[5].end_ns, events[6].end_ns]);
        let record = &trace.record.calls[call as usize - 1];
        let within = record.start_ns..=record.end_ns;
        assert!(events.iter().all(|e| within.contains(&e.start_ns) && within.contains(&e.end_ns)));
    }
}

/// The numbers of streams in these traces; `pp` and `io` get others.
pub fn overlap_ids() -> StreamIds {
    let ids = [("compute", 0), ("tp_collective", 7), ("a2a", 2)];
    StreamIds::new(ids.map(|(name, id)| (name.to_string(), id)).into())
}
