//! The rs_mm_ag attention module: keys are sharded along the contraction and values by heads;
//! partial scores are reduce-scattered over heads and outputs are all-gathered.
//!
//! Scattering over another dim gives wrong numbers without a run-time error: over keys, each rank
//! would normalise only its shard of a row; over queries, a rank would need all of the values.
//! Heads are the only dim that both matmuls keep whole.

use tessera_base::{Bytes, Diagnostic, Diagnostics, format_choices};
use tessera_ir::{Attr, Builder, Bundle, DType, Opcode, Phase, RoleRanks, StreamKind, Type, ValueId};
use tessera_mesh::{Axis, AxisLayout, Mesh, RankMap, Shard, split_units};

use crate::codes::{T0606, T0607, T0608};
use crate::memory;

/// The base role of every rank; roles of unequal feature shards append the first coordinate of
/// their class.
const ROLE: &str = "attention";
/// Dims of every tensor of the module are heads, sequences, rows and columns.
const HEADS_DIM: usize = 0;
const FEATURES_DIM: usize = 3;

/// Sizes of one layer's attention on one tp group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Number of query heads, over all ranks of tp.
    pub heads: u64,
    /// Number of key/value heads; `heads / kv_heads` query heads share one.
    pub kv_heads: u64,
    /// Features of a query or key per head: the contraction that is sharded.
    pub qk_dim: u64,
    /// Features of a value per head.
    pub v_dim: u64,
    /// Sequences per micro-batch.
    pub sequences: u64,
    /// Query positions per sequence: rows of the score matrix.
    pub queries: u64,
    /// Key positions per sequence: columns of the score matrix.
    pub keys: u64,
    /// Whether a query attends only to keys up to its own position.
    pub causal: bool,
    /// Dtype of the matmul operands and of the reduced scores.
    pub dtype: DType,
    /// Number of ranks over tp.
    pub tp: u32,
}

/// The layout in which queries arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QLayout {
    /// Each rank receives whole queries as an input and takes its features.
    Replicated,
    /// Queries are sharded by features as keys are, in the buffer `q`.
    Sharded,
}

impl AttentionShape {
    /// Returns the bytes of the partial scores of all heads that each rank writes before the
    /// reduction. Saturates.
    #[must_use]
    pub fn scores_bytes(&self) -> Bytes {
        let extents = [self.sequences, self.queries, self.keys, self.dtype.element_bytes()];
        Bytes(extents.iter().fold(self.heads, |n, e| n.saturating_mul(*e)))
    }

    /// Returns the number of K/V head stacks in the matmuls: `kv_heads`, or `tp` if each rank holds
    /// a copy of one of fewer heads. Returns `None` if tp can split neither.
    #[must_use]
    pub fn kv_stacks(&self) -> Option<u64> {
        let (tp, kv) = (u64::from(self.tp), self.kv_heads);
        let copies = kv > 0 && tp > 0 && tp.is_multiple_of(kv) && self.heads.is_multiple_of(tp);
        match self.heads > 0 && kv > 0 && tp > 0 && self.heads.is_multiple_of(kv) {
            true if kv.is_multiple_of(tp) => Some(kv),
            true if copies => Some(tp),
            _ => None,
        }
    }

    /// Returns every tp above 1 for which the module exists.
    fn legal_tp_sizes(&self) -> Vec<u64> {
        let most = u32::try_from(self.heads.min(self.qk_dim)).unwrap_or(u32::MAX);
        let ranks = (2..=most).take_while(|tp| Mesh::new([*tp, 1, 1, 1]).is_ok());
        ranks.filter(|tp| AttentionShape { tp: *tp, ..*self }.kv_stacks().is_some()).map(u64::from).collect()
    }

    /// Returns every reason why the module does not exist for this shape.
    fn check_fit(&self) -> Diagnostics {
        let (tp, mut ds) = (u64::from(self.tp), Vec::new());
        let shape_text =
            format!("{} heads of {} features, keys and values: {}", self.heads, self.qk_dim, self.kv_heads);
        let reject = |why: String| {
            let legal = self.legal_tp_sizes();
            let d = Diagnostic::error(&T0607, why).with_label("attention", shape_text.clone());
            match legal.is_empty() {
                true => d.with_hint("no tp is legal; use another scheme, such as megatron"),
                false => d.with_hint(format!(
                    "use tp = {}, or another scheme, such as megatron",
                    format_choices(&legal)
                )),
            }
        };
        if self.tp < 2 {
            ds.push(reject(format!("tp = {tp} leaves nothing to reduce and scatter")));
        } else if self.kv_stacks().is_none() {
            ds.push(reject(format!(
                "tp = {tp} does not split {} heads over {} key/value heads into equal shards",
                self.heads, self.kv_heads
            )));
        } else if self.qk_dim < tp {
            ds.push(reject(format!(
                "tp = {tp} over {} features per head leaves a rank without a feature",
                self.qk_dim
            )));
        }
        if self.causal && self.queries > 1 {
            ds.push(
                Diagnostic::error(
                    &T0608,
                    format!("{} queries per sequence need a causal mask", self.queries),
                )
                .with_label("attention", format!("{} keys", self.keys))
                .with_hint("a decoding step, with one query per sequence, needs no mask"),
            );
        }
        ds
    }
}

/// Builds the rs_mm_ag attention of one layer as a bundle of one phase: `Q · Kᵀ` over a rank's
/// features, reduce-scatter over heads, softmax over whole rows of keys, matmul with the rank's
/// heads of values, all-gather over heads.
///
/// Tensors are [stacks, sequences, rows, columns], with `stacks` from
/// [`AttentionShape::kv_stacks`]. The query heads that share a stack are consecutive in its rows:
/// `heads / stacks · tokens` rows. Keys reside in the buffer `kv.k`, sharded along their features,
/// and values in `kv.v`, sharded over stacks; neither is ever gathered. If tp does not divide the
/// features, shards differ by one feature and the ranks form two roles.
///
/// # Errors
/// Returns T0607 or T0608, and T0606 for sizes beyond the limits of a program.
pub fn rs_mm_ag(shape: &AttentionShape, q: QLayout) -> Result<Bundle, Diagnostics> {
    let mut ds = shape.check_fit();
    let (Some(stacks), true) = (shape.kv_stacks(), ds.is_empty()) else { return Err(ds) };
    let mesh = Mesh::new([shape.tp, 1, 1, 1]).map_err(|d| vec![*d])?;
    let Some(feature_shard) = Shard::new(FEATURES_DIM, shape.qk_dim, 1, shape.tp) else { return Err(ds) };
    // Feature shards differ by at most one; the longer ones come first.
    let features = |at: u32| split_units(shape.qk_dim, shape.tp, at).1;
    let mut first_coordinates = vec![0];
    first_coordinates.extend((1..shape.tp).find(|at| features(*at) != features(0)));
    let name =
        |at: u32| if first_coordinates.len() == 1 { ROLE.to_string() } else { format!("{ROLE}@tp{at}") };
    let names: Vec<String> = first_coordinates.iter().map(|at| name(*at)).collect();
    let mut programs = Vec::new();
    for (role, at) in names.iter().zip(&first_coordinates) {
        let b = Builder::new_role(ROLE, role, mesh, &[StreamKind::Compute, StreamKind::TpCollective]);
        let module = ProgramEmitter { shape, stacks, feature_shard, features: features(*at), builder: b };
        match module.emit_program(q).finish() {
            Ok(p) => programs.push(p),
            Err(es) => {
                ds.extend(
                    es.into_iter().map(|e| Diagnostic::error(&T0606, e.message).with_note(e.code.title)),
                );
            }
        }
    }
    if !ds.is_empty() {
        return Err(ds);
    }
    let roles = RoleRanks::assign_by_name(&mesh, &names.iter().map(String::as_str).collect::<Vec<_>>());
    let slots = programs.iter().map(memory::assign_slots).collect();
    Ok(Bundle {
        mesh,
        rank_map: RankMap::from_device_kind(&mesh, "device"),
        hosts: None,
        roles,
        phases: vec![Phase { name: ROLE.to_string(), programs, slots }],
        calls: vec![(ROLE.to_string(), vec![ROLE.to_string()])],
        mapping: String::new(),
    })
}

/// Writes the module's program for one rank, which holds one shard of the features.
struct ProgramEmitter<'a> {
    shape: &'a AttentionShape,
    stacks: u64,
    feature_shard: Shard,
    /// Features per head on this rank.
    features: u64,
    builder: Builder,
}

impl ProgramEmitter<'_> {
    fn emit_program(mut self, q: QLayout) -> Builder {
        let s = *self.shape;
        // The multiplication saturates: a program that is too large fails its type check instead of
        // wrapping.
        let rows = (s.heads / self.stacks).saturating_mul(s.queries);
        let by_features = |rows: u64| {
            Type::new(s.dtype, [self.stacks, s.sequences, rows, self.features])
                .with_axis_layout(Axis::Tp, AxisLayout::Shard(self.feature_shard))
        };
        let heads = AxisLayout::Shard(Shard { dim: HEADS_DIM, uneven: None, subgroup_size: None });
        let own = self.stacks / u64::from(s.tp);
        let values =
            Type::new(s.dtype, [own, s.sequences, s.keys, s.v_dim]).with_axis_layout(Axis::Tp, heads);
        let (queries, keys) = (by_features(rows), by_features(s.keys));
        let b = &mut self.builder;
        let q = match q {
            QLayout::Replicated => {
                let whole = Type::new(s.dtype, [self.stacks, s.sequences, rows, s.qk_dim]);
                let x = b.set_label("Q").add_input("Q", whole);
                b.set_label("Q_shard").set_attr("axis", "tp").set_attr("dim", FEATURES_DIM as u64);
                b.add_op(Opcode::TakeShard, &[x])
            }
            QLayout::Sharded => {
                let buffer = b.declare_buffer("q", queries);
                b.set_label("Q_shard").read_buffer(buffer)
            }
        };
        let (k, v) = (b.declare_buffer("kv.k", keys), b.declare_buffer("kv.v", values));
        let k = b.set_label("K_shard").read_buffer(k);
        b.set_label("S_partial")
            .set_attr("transposed", Attr::Bool(true))
            .set_attr("scale", (s.qk_dim as f64).sqrt().recip());
        let partial = b.add_op(Opcode::Bmm, &[q, k]);
        let scores = self.emit_collective("S_rs", Opcode::ReduceScatter, partial);
        let b = &mut self.builder;
        let p = b.set_label("P").add_op(Opcode::Softmax, &[scores]);
        let v = b.set_label("V_shard").read_buffer(v);
        let out = b.set_label("O_loc").add_op(Opcode::Bmm, &[p, v]);
        let out = self.emit_collective("O", Opcode::AllGather, out);
        self.builder.add_output("O", out);
        self.builder
    }

    /// Issues a collective over heads on its own stream after all preceding compute, and waits at
    /// once because the next op reads the result.
    fn emit_collective(&mut self, label: &str, opcode: Opcode, x: ValueId) -> ValueId {
        let b = &mut self.builder;
        let event = b.add_op(Opcode::EventRecord, &[]);
        b.set_attr("axis", "tp").set_attr("dim", HEADS_DIM as u64);
        if opcode == Opcode::ReduceScatter {
            b.set_attr("reduction", "sum");
        }
        b.set_stream(StreamKind::TpCollective).start_after(event);
        let ticket = b.add_issue(opcode, &[x]);
        b.set_label(label).add_wait(ticket, None).unwrap_or(ticket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: AttentionShape = AttentionShape {
        heads: 12,
        kv_heads: 12,
        qk_dim: 8,
        v_dim: 8,
        sequences: 1,
        queries: 1,
        keys: 16,
        causal: true,
        dtype: DType::Bf16,
        tp: 4,
    };

    fn rejections(s: AttentionShape) -> Vec<(&'static str, String, String)> {
        let ds = rs_mm_ag(&s, QLayout::Replicated).err().unwrap_or_default();
        ds.into_iter().map(|d| (d.code.id, d.message, d.hint.unwrap_or_default())).collect()
    }

    #[test]
    fn unscatterable_shapes_are_rejected_with_legal_tp_sizes() {
        assert!(rejections(S).is_empty());
        let uneven = rejections(AttentionShape { tp: 5, ..S });
        assert_eq!(uneven[0].0, "T0607");
        assert!(uneven[0].2.starts_with("use tp = 2, 3, 4 or 6, or"), "{uneven:?}");
        // With 2 key/value heads, tp either divides them or is a multiple of 2 that divides 12
        // heads.
        let grouped = rejections(AttentionShape { kv_heads: 2, tp: 3, ..S });
        assert!(grouped[0].2.starts_with("use tp = 2, 4 or 6, or"), "{grouped:?}");
        assert!(rejections(AttentionShape { tp: 12, ..S })[0].1.contains("8 features"));
        assert_eq!(rejections(AttentionShape { tp: 1, ..S })[0].0, "T0607");
        assert_eq!(rejections(AttentionShape { tp: 0, ..S })[0].0, "T0607");
        assert_eq!(rejections(AttentionShape { heads: 0, ..S })[0].0, "T0607");
        assert_eq!(rejections(AttentionShape { queries: 2, ..S })[0].0, "T0608");
        assert!(rejections(AttentionShape { queries: 2, causal: false, ..S }).is_empty());
        for too_large in [AttentionShape { keys: u64::MAX, ..S }, AttentionShape { v_dim: 0, ..S }] {
            assert!(rejections(too_large).iter().all(|r| r.0 == "T0606"));
            assert!(!rejections(too_large).is_empty());
        }
    }

    #[test]
    fn score_bytes_cover_all_heads() {
        assert_eq!(S.scores_bytes(), Bytes(12 * 16 * 2));
        for q in [QLayout::Replicated, QLayout::Sharded] {
            let bundle = rs_mm_ag(&S, q).unwrap_or_else(|ds| panic!("{ds:?}"));
            let p = &bundle.phases[0].programs[0];
            let scores = p.values.iter().find(|v| v.name == "S_partial").map(|v| v.ty.byte_size());
            assert_eq!(scores, Some(S.scores_bytes()));
        }
        let grouped = AttentionShape { kv_heads: 2, ..S };
        assert_eq!(grouped.kv_stacks(), Some(4), "each key/value head has two copies");
        let bundle = rs_mm_ag(&grouped, QLayout::Sharded).unwrap_or_else(|ds| panic!("{ds:?}"));
        let scores = bundle.phases[0].programs[0].values.iter().find(|v| v.name == "S_partial");
        assert_eq!(scores.map(|v| v.ty.byte_size()), Some(grouped.scores_bytes()));
    }
}
