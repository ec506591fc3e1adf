//! The attention module of rs_mm_ag: keys cut along the contraction, values by heads, partial scores reduced and
//! scattered over heads, outputs gathered.
//!
//! Other dims to scatter over give wrong numbers and no error at run time: over keys each rank would normalise its own
//! piece; over queries a rank would need all of the values. Heads are the one dim that stays whole in both products.

use tessera_base::{Bytes, Code, Diagnostic, Diagnostics, choices};
use tessera_ir::{Attr, Builder, Bundle, DType, Opcode, Phase, RoleRanks, Type, ValueId};
use tessera_mesh::{Axis, AxisLayout, Mesh, RankMap, Shard, split};

use crate::lower::T0606;
use crate::memory;

/// Heads or features that tp does not cut.
pub static T0607: Code = Code {
    id: "T0607",
    title: "attention cannot be scattered over heads",
    page: "rs_mm_ag reduces partial scores and leaves each rank of tp whole heads. A reduce-scatter has equal pieces, and \
a value that is still a sum over ranks cannot be padded, so tp must divide the heads. Where keys and values have fewer \
heads, tp divides those, or is a multiple of them and every rank has a copy of one. Partial scores come from features \
of a head: each rank needs at least one. With tp = 1 there is nothing to reduce. The hint lists the values of tp that \
do; other schemes take heads that differ by one.",
};
/// Causal attention of several queries.
pub static T0608: Code = Code {
    id: "T0608",
    title: "no op masks scores between two products",
    page: "Where a query may see no later key, scores are masked before their softmax. A fused attention does so by itself; \
between `dot` and `softmax` no op does, and a mask as a tensor would be as large as the scores of all heads. A decoding \
step has one query, which sees every key, and needs no mask: there the module exists. What was estimated for other jobs \
stays an estimate.",
};

/// The role of every rank, before the class of its piece.
const ROLE: &str = "attention";
/// Dims of every tensor of the module: heads, sequences, then rows by columns.
const HEADS: usize = 0;
const FEATURES: usize = 3;

/// Sizes of one layer's attention on one group of tp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: u64,
    /// Heads of keys and values; `heads / kv_heads` query heads share one.
    pub kv_heads: u64,
    /// Features of a query and a key, per head: the contraction that is cut.
    pub qk: u64,
    /// Features of a value, per head.
    pub v: u64,
    /// Sequences of a micro-batch.
    pub sequences: u64,
    /// Queries of a sequence.
    pub tokens: u64,
    /// Keys of a sequence.
    pub keys: u64,
    /// Whether a query sees no later key.
    pub causal: bool,
    /// What is multiplied and reduced.
    pub dtype: DType,
    /// Ranks.
    pub tp: u32,
}

/// How queries arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QLayout {
    /// Whole on every rank, as an input; each takes its features.
    Replicated,
    /// Cut by features as keys are, in the buffer `q`.
    Sharded,
}

impl AttentionShape {
    /// Partial scores of all heads that each rank writes before they are reduced. Saturates.
    #[must_use]
    pub fn scores_bytes(&self) -> Bytes {
        let extents = [self.sequences, self.tokens, self.keys, self.dtype.bytes()];
        Bytes(extents.iter().fold(self.heads, |n, e| n.saturating_mul(*e)))
    }

    /// Stacks of keys and values that are multiplied: `kv_heads`, or `tp` where each rank has a copy of one of fewer.
    /// `None` where tp cuts neither.
    #[must_use]
    pub fn stacks(&self) -> Option<u64> {
        let (tp, kv) = (u64::from(self.tp), self.kv_heads);
        let copies = kv > 0 && tp > 0 && tp.is_multiple_of(kv) && self.heads.is_multiple_of(tp);
        match self.heads > 0 && kv > 0 && tp > 0 && self.heads.is_multiple_of(kv) {
            true if kv.is_multiple_of(tp) => Some(kv),
            true if copies => Some(tp),
            _ => None,
        }
    }

    /// Every tp above 1 under which the module exists.
    fn neighbours(&self) -> Vec<u64> {
        let most = u32::try_from(self.heads.min(self.qk)).unwrap_or(u32::MAX);
        let ranks = (2..=most).take_while(|tp| Mesh::new([*tp, 1, 1, 1]).is_ok());
        ranks.filter(|tp| AttentionShape { tp: *tp, ..*self }.stacks().is_some()).map(u64::from).collect()
    }

    /// Why there is no such module.
    fn misfits(&self) -> Diagnostics {
        let (tp, mut ds) = (u64::from(self.tp), Vec::new());
        let place =
            format!("{} heads of {} features, keys and values: {}", self.heads, self.qk, self.kv_heads);
        let refuse = |why: String| {
            let near = self.neighbours();
            let d = Diagnostic::error(&T0607, why).at("attention", place.clone());
            match near.is_empty() {
                true => d.hint("no tp does; use another scheme, such as megatron"),
                false => {
                    d.hint(format!("tp = {} would do, or another scheme, such as megatron", choices(&near)))
                }
            }
        };
        if self.tp < 2 {
            ds.push(refuse(format!("tp = {tp} leaves nothing to reduce and scatter")));
        } else if self.stacks().is_none() {
            ds.push(refuse(format!(
                "tp = {tp} does not cut {} heads over {} of keys and values into equal pieces",
                self.heads, self.kv_heads
            )));
        } else if self.qk < tp {
            ds.push(refuse(format!(
                "tp = {tp} over {} features of a head leaves a rank without one",
                self.qk
            )));
        }
        if self.causal && self.tokens > 1 {
            ds.push(
                Diagnostic::error(&T0608, format!("{} queries of a sequence see no later key", self.tokens))
                    .at("attention", format!("{} keys", self.keys))
                    .hint("a decoding step, with one query a sequence, needs no mask"),
            );
        }
        ds
    }
}

/// The attention of one layer under rs_mm_ag, as one phase: `Q · Kᵀ` over a rank's features, reduce-scatter over heads,
/// softmax over whole rows of keys, times the rank's heads of values, all-gather over heads.
///
/// Tensors are [stacks, sequences, rows, columns], with `stacks` of [`AttentionShape::stacks`]. The query heads that
/// share a stack stand one after another in its rows: `heads / stacks · tokens` of them. Keys lie in the buffer `kv.k`,
/// cut along their features, and values in `kv.v`, cut over stacks: neither is ever gathered. Where features do not
/// divide, pieces differ by one and the ranks play two roles.
///
/// # Errors
/// T0607, T0608; T0606 for sizes beyond what a program may hold.
pub fn rs_mm_ag(shape: &AttentionShape, q: QLayout) -> Result<Bundle, Diagnostics> {
    let mut ds = shape.misfits();
    let (Some(stacks), true) = (shape.stacks(), ds.is_empty()) else { return Err(ds) };
    let mesh = Mesh::new([shape.tp, 1, 1, 1]).map_err(|d| vec![*d])?;
    let Some(cut) = Shard::of(FEATURES, shape.qk, 1, shape.tp) else { return Err(ds) };
    // Pieces of features differ by one at most: the longer ones come first.
    let features = |at: u32| split(shape.qk, shape.tp, at).1;
    let mut firsts = vec![0];
    firsts.extend((1..shape.tp).find(|at| features(*at) != features(0)));
    let name = |at: u32| if firsts.len() == 1 { ROLE.to_string() } else { format!("{ROLE}@tp{at}") };
    let names: Vec<String> = firsts.iter().map(|at| name(*at)).collect();
    let mut programs = Vec::new();
    for (role, at) in names.iter().zip(&firsts) {
        let b = Builder::role(ROLE, role, mesh, &["compute", "tp_collective"]);
        let module = Module { shape, stacks, cut, features: features(*at), b };
        match module.build(q).finish() {
            Ok(p) => programs.push(p),
            Err(es) => {
                ds.extend(es.into_iter().map(|e| Diagnostic::error(&T0606, e.message).note(e.code.title)));
            }
        }
    }
    if !ds.is_empty() {
        return Err(ds);
    }
    let roles = RoleRanks::by_name(&mesh, &names.iter().map(String::as_str).collect::<Vec<_>>());
    let memory = programs.iter().map(memory::place).collect();
    Ok(Bundle {
        mesh,
        rank_map: RankMap::logical(&mesh, "device"),
        roles,
        phases: vec![Phase { name: ROLE.to_string(), programs, memory }],
        calls: vec![(ROLE.to_string(), vec![ROLE.to_string()])],
        mapping: String::new(),
    })
}

/// One rank's program in the making.
struct Module<'a> {
    shape: &'a AttentionShape,
    stacks: u64,
    cut: Shard,
    /// Features of a head on this rank.
    features: u64,
    b: Builder,
}

impl Module<'_> {
    fn build(mut self, q: QLayout) -> Builder {
        let s = *self.shape;
        // The product is checked: in a program that is too large the type is refused, not wrapped.
        let rows = (s.heads / self.stacks).saturating_mul(s.tokens);
        let by_features = |rows: u64| {
            Type::new(s.dtype, [self.stacks, s.sequences, rows, self.features])
                .on(Axis::Tp, AxisLayout::Shard(self.cut))
        };
        let heads = AxisLayout::Shard(Shard { dim: HEADS, uneven: None, ways: None });
        let own = self.stacks / u64::from(s.tp);
        let values = Type::new(s.dtype, [own, s.sequences, s.keys, s.v]).on(Axis::Tp, heads);
        let (queries, keys) = (by_features(rows), by_features(s.keys));
        let b = &mut self.b;
        let q = match q {
            QLayout::Replicated => {
                let whole = Type::new(s.dtype, [self.stacks, s.sequences, rows, s.qk]);
                let x = b.label("Q").input("Q", whole);
                b.label("Q_shard").attr("axis", "tp").attr("dim", FEATURES as u64);
                b.op(Opcode::TakeShard, &[x])
            }
            QLayout::Sharded => {
                let buffer = b.buffer("q", queries);
                b.label("Q_shard").read(buffer)
            }
        };
        let (k, v) = (b.buffer("kv.k", keys), b.buffer("kv.v", values));
        let k = b.label("K_shard").read(k);
        b.label("S_partial").attr("transposed", Attr::Bool(true)).attr("scale", (s.qk as f64).sqrt().recip());
        let partial = b.op(Opcode::Dot, &[q, k]);
        let scores = self.collective("S_rs", Opcode::ReduceScatter, partial);
        let b = &mut self.b;
        let p = b.label("P").op(Opcode::Softmax, &[scores]);
        let v = b.label("V_shard").read(v);
        let out = b.label("O_loc").op(Opcode::Dot, &[p, v]);
        let out = self.collective("O", Opcode::AllGather, out);
        self.b.output("O", out);
        self.b
    }

    /// Over heads, on its own stream, after all that was computed; awaited at once, since the next op reads it.
    fn collective(&mut self, label: &str, opcode: Opcode, x: ValueId) -> ValueId {
        let b = &mut self.b;
        let event = b.op(Opcode::EventRecord, &[]);
        b.attr("axis", "tp").attr("dim", HEADS as u64);
        if opcode == Opcode::ReduceScatter {
            b.attr("reduction", "sum");
        }
        b.stream("tp_collective").after(event);
        let ticket = b.issue(opcode, &[x]);
        b.label(label).wait(ticket, None).unwrap_or(ticket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: AttentionShape = AttentionShape {
        heads: 12,
        kv_heads: 12,
        qk: 8,
        v: 8,
        sequences: 1,
        tokens: 1,
        keys: 16,
        causal: true,
        dtype: DType::Bf16,
        tp: 4,
    };

    fn refused(s: AttentionShape) -> Vec<(&'static str, String, String)> {
        let ds = rs_mm_ag(&s, QLayout::Replicated).err().unwrap_or_default();
        ds.into_iter().map(|d| (d.code.id, d.message, d.hint.unwrap_or_default())).collect()
    }

    #[test]
    fn what_cannot_be_scattered_is_refused_with_its_neighbours() {
        assert!(refused(S).is_empty());
        let uneven = refused(AttentionShape { tp: 5, ..S });
        assert_eq!(uneven[0].0, "T0607");
        assert!(uneven[0].2.starts_with("tp = 2, 3, 4 or 6 would do"), "{uneven:?}");
        // 2 heads of keys and values: tp cuts them, or is a multiple of 2 that divides 12 heads.
        let grouped = refused(AttentionShape { kv_heads: 2, tp: 3, ..S });
        assert!(grouped[0].2.starts_with("tp = 2, 4 or 6 would do"), "{grouped:?}");
        assert!(refused(AttentionShape { tp: 12, ..S })[0].1.contains("8 features"));
        assert_eq!(refused(AttentionShape { tp: 1, ..S })[0].0, "T0607");
        assert_eq!(refused(AttentionShape { tp: 0, ..S })[0].0, "T0607");
        assert_eq!(refused(AttentionShape { heads: 0, ..S })[0].0, "T0607");
        assert_eq!(refused(AttentionShape { tokens: 2, ..S })[0].0, "T0608");
        assert!(refused(AttentionShape { tokens: 2, causal: false, ..S }).is_empty());
        for too_large in [AttentionShape { keys: u64::MAX, ..S }, AttentionShape { v: 0, ..S }] {
            assert!(refused(too_large).iter().all(|r| r.0 == "T0606"));
            assert!(!refused(too_large).is_empty());
        }
    }

    #[test]
    fn scores_are_those_of_all_heads() {
        assert_eq!(S.scores_bytes(), Bytes(12 * 16 * 2));
        for q in [QLayout::Replicated, QLayout::Sharded] {
            let bundle = rs_mm_ag(&S, q).unwrap_or_else(|ds| panic!("{ds:?}"));
            let p = &bundle.phases[0].programs[0];
            let scores = p.values.iter().find(|v| v.name == "S_partial").map(|v| v.ty.bytes());
            assert_eq!(scores, Some(S.scores_bytes()));
        }
        let grouped = AttentionShape { kv_heads: 2, ..S };
        assert_eq!(grouped.stacks(), Some(4), "each head of keys and values twice");
        let bundle = rs_mm_ag(&grouped, QLayout::Sharded).unwrap_or_else(|ds| panic!("{ds:?}"));
        let scores = bundle.phases[0].programs[0].values.iter().find(|v| v.name == "S_partial");
        assert_eq!(scores.map(|v| v.ty.bytes()), Some(grouped.scores_bytes()));
    }
}
