//! Weights in memory: loading shards, fingerprinting, auditing and reloading them.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::Diagnostic;
use tessera_base::random::{DrawKey, fill_normals};
use tessera_device::{AuditResult, Fingerprint, FingerprintHasher, MeshRank, WeightSource, describe_slice};
use tessera_ir::{DType, ExpertTier, Op, OpView, Opcode, Program, Type, WeightLoad, views};

use super::expert_tiers::ExpertTiers;
use super::memory::{WeightData, is_narrow};
use super::weight_units::{locate_unit, units_of_rows};
use super::{CpuBackend, WeightForm, WeightKey};
use crate::Pool;
use crate::kernels::{
    PackedWeight, RopeSpec, RopeTables, UNPACK_ROWS, is_exact_bf16, narrow_to_bf16, round_to_dtype,
    time_embed, widen_to_f32,
};

/// The origin of a loaded shard, and its fingerprint at load time.
#[derive(Debug)]
pub(super) struct LoadedShard {
    name: String,
    ty: Type,
    load: Option<WeightLoad>,
    /// Whether bf16 may store the shard, if that is exact.
    may_be_bf16: bool,
    fingerprint: Fingerprint,
}

/// Where the next step of the weight audit continues: the shard, the unit of it to hash, and the
/// hash of the units before.
#[derive(Debug, Default)]
pub(super) struct WeightAuditCursor {
    shard: usize,
    unit: usize,
    hash: FingerprintHasher,
    /// Rows unpacked from a packed weight.
    rows: Vec<f32>,
}

impl WeightAuditCursor {
    /// Elements for which the cursor holds memory.
    pub(super) fn row_capacity(&self) -> usize {
        self.rows.capacity()
    }
}

impl CpuBackend {
    /// Returns the index of a weight op's shard, and loads it on first use.
    pub(super) fn load_weight(
        &mut self,
        p: &Program,
        op: &Op,
        load: Option<WeightLoad>,
        source: &mut dyn WeightSource,
    ) -> Result<usize, Diagnostic> {
        let (name, v) = (op.name.clone().unwrap_or_default(), op.results[0]);
        let ty = p.type_of(v);
        // Whether each user is an op of these kinds that reads the weight as its second operand alone.
        let only_feeds = |opcodes: &[Opcode]| {
            p.ops.iter().filter(|o| o.used_values().any(|u| u == v)).all(|o| {
                let elsewhere = o.used_values().filter(|u| *u == v).count() > 1;
                opcodes.contains(&o.opcode) && o.operands[1] == v && !elsewhere
            })
        };
        let has_choice = match ty.shape.len() {
            2 => only_feeds(&[Opcode::Matmul, Opcode::Conv3d]),
            3 => only_feeds(&[Opcode::GroupedMatmul]),
            _ => false,
        };
        let may_be_bf16 = self.stores_bf16 || is_narrow(ty);
        let form = match () {
            () if has_choice && self.packs_weights => WeightForm::Packed,
            () if may_be_bf16 && only_feeds(&[Opcode::Embed]) => WeightForm::Table,
            () => WeightForm::Plain,
        };
        let tier = op.expert_tier();
        let mut key = WeightKey { ty: ty.display_on(&p.mesh).to_string(), load, form, tier, name };
        // Every kernel can use a plain weight; in the opposite case the weight is loaded a second time.
        for found in [form, WeightForm::Plain] {
            key.form = found;
            if let Some(i) = self.weight_index.get(&key) {
                return Ok(*i);
            }
        }
        key.form = form;
        if let Some(tier) = tier {
            return self.load_tiered_weight((p, &key.name), (tier, ty), source).inspect(|index| {
                self.weight_index.insert(key, *index);
            });
        }
        let bytes = ty.element_count().saturating_mul(4);
        self.budget.reserve_bytes(&format!("weight {}", key.name), bytes)?;
        let mut piece = LoadedShard {
            name: key.name.clone(),
            ty: ty.clone(),
            load,
            may_be_bf16: may_be_bf16 && form != WeightForm::Plain,
            fingerprint: FingerprintHasher::default().finish("", ""),
        };
        let packed = form == WeightForm::Packed;
        let data = piece.read(&self.pool, &self.placement, packed, source, &mut self.audit_cursor.rows)?;
        if data.is_bf16() {
            self.budget.give_back(bytes / 2);
        }
        self.memory.weights.push(data);
        self.shards.push(piece);
        let index = self.memory.weights.len() - 1;
        if has_choice {
            self.matmul_weights.insert((key.ty.clone(), index));
        }
        self.weight_index.insert(key, index);
        Ok(index)
    }

    /// Allocates the pool of a weight whose experts lie in two tiers, and fingerprints all of its experts in host memory.
    fn load_tiered_weight(
        &mut self,
        (p, name): (&Program, &str),
        (tier, ty): (ExpertTier, &Type),
        source: &mut dyn WeightSource,
    ) -> Result<usize, Diagnostic> {
        let wide = Type { dtype: DType::F32, ..ty.clone() };
        let bytes = tier.resident_bytes(&wide).0;
        let reserved = if is_narrow(ty) { bytes / 2 } else { bytes };
        self.budget.reserve_bytes(&format!("pool of weight {name}"), reserved)?;
        let experts = source.open_experts(name, ty, &self.placement)?;
        let bank = self.tiers.add_bank((&p.name, name), (tier, ty), &self.placement, experts)?;
        let mut piece = LoadedShard {
            name: name.to_string(),
            ty: ty.clone(),
            load: None,
            may_be_bf16: is_narrow(ty),
            fingerprint: FingerprintHasher::default().finish("", ""),
        };
        let rows = &mut self.audit_cursor.rows;
        piece.take_fingerprint(&WeightData::Tiered(bank), &self.tiers, &self.placement, rows);
        self.memory.weights.push(WeightData::Tiered(bank));
        self.shards.push(piece);
        Ok(self.memory.weights.len() - 1)
    }

    /// Returns the stored form of the weights of matmuls, by type.
    pub(super) fn describe_matmul_routes(&self) -> BTreeMap<String, String> {
        let mut routes = BTreeMap::new();
        for (ty, index) in &self.matmul_weights {
            let form = match &self.memory.weights[*index] {
                WeightData::Packed(_) if self.memory.weights[*index].is_bf16() => "packed weight in bf16",
                WeightData::Packed(_) => "packed weight",
                WeightData::Plain(_) | WeightData::Bf16(_) => "plain weight",
                WeightData::Tiered(_) => "packed weight in a pool",
            };
            let forms: &mut BTreeSet<&str> = routes.entry(format!("route: matmul by {ty}")).or_default();
            forms.insert(form);
        }
        let join = |forms: BTreeSet<&str>| forms.into_iter().collect::<Vec<_>>().join(", ");
        routes.into_iter().map(|(ty, forms)| (ty, join(forms))).collect()
    }

    /// Records fingerprints of the tables that an op's kernel derives from constants alone. No
    /// table is kept from load to run, and the tables kept between runs depend on the call. One
    /// probe of each therefore represents all of them: its fingerprint differs where the underlying
    /// arithmetic does.
    pub(super) fn fingerprint_derived(&mut self, p: &Program, op: &Op, view: &OpView) {
        let result_width = || p.type_of(op.results[0]).shape.last().copied().unwrap_or(0);
        let (table, tensor) = match view {
            OpView::Rope(v) => (
                DerivedTable::Rope(v),
                format!("(rope table, head {}, grid {:?}, stride {})", v.head_dim, v.grid, v.frame_stride),
            ),
            OpView::TimeEmbed(_) => {
                let width = result_width();
                (DerivedTable::Time { width: width as usize }, format!("(time table, width {width})"))
            }
            OpView::Renoise(_) => (DerivedTable::Normals, NORMAL_DRAWS_NAME.to_string()),
            _ => return,
        };
        if self.derived_fingerprints.iter().any(|f| f.tensor == tensor) {
            return;
        }
        let mut hash = FingerprintHasher::default();
        table.hash_probe(&mut hash);
        self.derived_fingerprints.push(hash.finish(tensor, "whole"));
    }

    pub(super) fn list_fingerprints(&self) -> Vec<Fingerprint> {
        let mut all: Vec<Fingerprint> =
            self.shards.iter().map(|p| &p.fingerprint).chain(&self.derived_fingerprints).cloned().collect();
        // A tensor stored both packed and plain is one shard; if its two copies differed, both
        // fingerprints would be listed.
        all.sort();
        all.dedup();
        all
    }

    pub(super) fn audit_next_units(&mut self, bytes: u64) -> AuditResult {
        let (mut audited, mut budget) = (AuditResult::default(), bytes);
        let WeightAuditCursor { shard: piece, unit, hash, rows } = &mut self.audit_cursor;
        while audited.rounds == 0
            && let Some(weight) = self.memory.weights.get(*piece)
        {
            let size = weight.unit_bytes(&self.tiers, *unit);
            if size > budget {
                break;
            }
            weight.hash_unit(&self.tiers, *unit, self.shards[*piece].ty.dtype, hash, rows);
            budget -= size;
            audited.bytes += size;
            *unit += 1;
            if *unit < weight.unit_count(&self.tiers) {
                continue;
            }
            let (print, found) = (&self.shards[*piece].fingerprint, std::mem::take(hash).digest());
            if found != print.digest {
                audited.changed.get_or_insert_with(|| (print.clone(), found));
            }
            *unit = 0;
            *piece += 1;
            if *piece == self.memory.weights.len() {
                *piece = 0;
                audited.rounds = 1;
            }
        }
        audited
    }

    pub(super) fn replace_weights(&mut self, source: &mut dyn WeightSource) -> Result<(), Diagnostic> {
        for p in &self.shards {
            source.check(&p.name, &p.ty, p.load.map(WeightLoad::name), &self.placement)?;
        }
        self.audit_cursor = WeightAuditCursor::default();
        for (piece, weight) in self.shards.iter_mut().zip(&mut self.memory.weights) {
            let rows = &mut self.audit_cursor.rows;
            if let WeightData::Tiered(bank) = weight {
                let experts = source.open_experts(&piece.name, &piece.ty, &self.placement)?;
                self.tiers.replace_source(*bank, experts);
                piece.take_fingerprint(weight, &self.tiers, &self.placement, rows);
                continue;
            }
            let packed = matches!(weight, WeightData::Packed(_));
            *weight = piece.read(&self.pool, &self.placement, packed, source, rows)?;
        }
        Ok(())
    }

    pub(super) fn read_element(&self, name: &str, index: u64) -> Option<f32> {
        let index = usize::try_from(index).ok()?;
        let mut shards = self.shards.iter().zip(&self.memory.weights).filter(|(p, _)| p.name == name);
        shards.find_map(|(_, weight)| match weight {
            WeightData::Packed(matrices) => {
                let (matrix, at) = locate_element(matrices, index);
                matrices.get(matrix)?.get(at)
            }
            WeightData::Plain(v) => v.get(index).copied(),
            WeightData::Bf16(v) => v.get(index).map(|x| widen_to_f32(*x)),
            WeightData::Tiered(bank) => self.tiers.read_element(*bank, index),
        })
    }

    pub(super) fn write_element(&mut self, name: &str, index: u64, value: f32) -> bool {
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        self.shards.iter().zip(&mut self.memory.weights).filter(|(p, _)| p.name == name).any(|(_, weight)| {
            match weight {
                WeightData::Packed(matrices) => {
                    let (matrix, at) = locate_element(matrices, index);
                    matrices.get_mut(matrix).is_some_and(|w| w.set(at, value))
                }
                WeightData::Plain(v) => v.get_mut(index).map(|x| *x = value).is_some(),
                WeightData::Bf16(v) => v.get_mut(index).map(|x| *x = narrow_to_bf16(value)).is_some(),
                WeightData::Tiered(bank) => self.tiers.write_element(*bank, index, value),
            }
        })
    }
}

/// A table that a kernel derives from constants alone.
enum DerivedTable<'a> {
    Rope(&'a views::Rope),
    Time { width: usize },
    Normals,
}

impl DerivedTable<'_> {
    fn hash_probe(&self, hash: &mut FingerprintHasher) {
        match *self {
            DerivedTable::Rope(v) => {
                let tables = RopeTables::new(RopeSpec {
                    head_dim: v.head_dim as usize,
                    grid: v.grid.map(|n| n as usize),
                    start: PROBE_VALUE,
                    frame_stride: v.frame_stride,
                });
                hash.update_f64(tables.cos_sin_values());
            }
            DerivedTable::Time { width } => {
                let mut out = vec![0.0; 2 * width];
                time_embed(&mut out, &[PROBE_VALUE as f32, 0.5]);
                hash.update(&out);
            }
            DerivedTable::Normals => {
                let mut out = vec![0.0; 1024];
                fill_normals(DrawKey { seed: PROBE_VALUE as u64, chunk: 1, draw: 2 }, 0, &mut out);
                hash.update(&out);
            }
        }
    }
}

/// Position, timestep and seed of the sample values whose hashes are the derived fingerprints.
const PROBE_VALUE: i64 = 1021;

/// Random numbers come from a counter and have no state; only the arithmetic from bits to normals
/// may differ.
const NORMAL_DRAWS_NAME: &str = "(normal draws)";

/// Number of elements of a plain weight that are hashed at once.
const UNIT_ELEMENTS: usize = 16 << 10;

impl LoadedShard {
    /// Loads the shard and computes its fingerprint from memory, after packing.
    fn read(
        &mut self,
        pool: &Pool,
        mesh_rank: &MeshRank,
        packed: bool,
        source: &mut dyn WeightSource,
        rows: &mut Vec<f32>,
    ) -> Result<WeightData, Diagnostic> {
        let load = self.load.map(WeightLoad::name);
        let mut data = source.read(&self.name, &self.ty, load, mesh_rank)?;
        round_to_dtype(pool, &mut data, self.ty.dtype);
        let weight = match self.ty.shape[..] {
            [ref groups @ .., n, k] if packed => {
                let extents = [groups.iter().product(), n, k].map(|n| n as usize);
                WeightData::Packed(pack_matrices(pool, &data, extents, self.may_be_bf16))
            }
            _ if self.may_be_bf16 && data.iter().all(|x| is_exact_bf16(*x)) => {
                WeightData::Bf16(data.iter().map(|x| narrow_to_bf16(*x)).collect())
            }
            _ => WeightData::Plain(data),
        };
        self.take_fingerprint(&weight, &ExpertTiers::default(), mesh_rank, rows);
        Ok(weight)
    }

    /// Computes the fingerprint of the weight as it is stored.
    fn take_fingerprint(
        &mut self,
        weight: &WeightData,
        tiers: &ExpertTiers,
        mesh_rank: &MeshRank,
        rows: &mut Vec<f32>,
    ) {
        let mut hash = FingerprintHasher::default();
        for unit in 0..weight.unit_count(tiers) {
            weight.hash_unit(tiers, unit, self.ty.dtype, &mut hash, rows);
        }
        let load = self.load.map(WeightLoad::name);
        self.fingerprint = hash.finish(&self.name, describe_slice(&self.ty, load, mesh_rank));
    }
}

/// Packs the matrices of `w[count, n, k]`, in bf16 if that may be and every element is exact in it.
fn pack_matrices(pool: &Pool, w: &[f32], [count, n, k]: [usize; 3], may_be_bf16: bool) -> Vec<PackedWeight> {
    let matrices = || (0..count).map(|i| &w[i * n * k..][..n * k]);
    let bf16 = may_be_bf16.then(|| matrices().map(|w| PackedWeight::new_bf16(pool, w, n, k)).collect());
    bf16.flatten().unwrap_or_else(|| matrices().map(|w| PackedWeight::new(pool, w, n, k)).collect())
}

/// Returns the matrix of an element of a packed weight, and the element's index in it.
fn locate_element(matrices: &[PackedWeight], index: usize) -> (usize, usize) {
    let elements = matrices.first().map_or(1, |w| w.shape().0 * w.shape().1).max(1);
    (index / elements, index % elements)
}

/// Returns the number of units of one matrix of a packed weight.
fn units_of_matrix(matrix: &PackedWeight) -> usize {
    units_of_rows(matrix.shape().0)
}

impl WeightData {
    fn is_bf16(&self) -> bool {
        match self {
            WeightData::Plain(_) => false,
            WeightData::Packed(p) => p.iter().all(PackedWeight::is_bf16),
            WeightData::Bf16(_) => true,
            WeightData::Tiered(_) => false,
        }
    }

    fn unit_count(&self, tiers: &ExpertTiers) -> usize {
        match self {
            WeightData::Plain(v) => v.len().div_ceil(UNIT_ELEMENTS).max(1),
            WeightData::Bf16(v) => v.len().div_ceil(UNIT_ELEMENTS).max(1),
            WeightData::Packed(p) => p.len() * p.first().map_or(0, units_of_matrix),
            WeightData::Tiered(bank) => tiers.unit_count(*bank),
        }
    }

    fn unit_bytes(&self, tiers: &ExpertTiers, unit: usize) -> u64 {
        let elements = match self {
            WeightData::Plain(v) => (v.len() - unit * UNIT_ELEMENTS).min(UNIT_ELEMENTS),
            WeightData::Bf16(v) => (v.len() - unit * UNIT_ELEMENTS).min(UNIT_ELEMENTS),
            WeightData::Packed(p) => {
                let (matrix, first) = locate_unit(p.first().map_or(1, units_of_matrix), unit);
                let (n, k) = p[matrix].shape();
                (n - first).min(UNPACK_ROWS) * k
            }
            WeightData::Tiered(bank) => tiers.unit_elements(*bank, unit),
        };
        elements as u64 * 4
    }

    /// Hashes unit number `unit`, which is [`UNIT_ELEMENTS`] elements or [`UNPACK_ROWS`] rows, in
    /// the order of the tensor's elements, as numbers of the dtype of its type: a GPU stores these.
    fn hash_unit(
        &self,
        tiers: &ExpertTiers,
        unit: usize,
        dtype: DType,
        hash: &mut FingerprintHasher,
        rows: &mut Vec<f32>,
    ) {
        match self {
            WeightData::Plain(v) => {
                hash.update_as(v.chunks(UNIT_ELEMENTS).nth(unit).unwrap_or_default(), dtype);
            }
            WeightData::Bf16(v) => {
                rows.clear();
                rows.extend(
                    v.chunks(UNIT_ELEMENTS).nth(unit).unwrap_or_default().iter().map(|x| widen_to_f32(*x)),
                );
                hash.update_as(rows, dtype);
            }
            WeightData::Packed(p) => {
                let (matrix, first) = locate_unit(p.first().map_or(1, units_of_matrix), unit);
                p[matrix].unpack_rows(first, rows);
                hash.update_as(rows, dtype);
            }
            WeightData::Tiered(bank) => {
                tiers.read_unit(*bank, unit, rows);
                hash.update_as(rows, dtype);
            }
        }
    }
}
