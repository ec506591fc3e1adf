//! Weights of a rank: loading shards, fingerprinting them, auditing them against their fingerprints, and
//! reloading them. A shard lies in device memory, or its experts lie in two tiers.

use std::collections::BTreeMap;
use std::time::Instant;

use tessera_base::Diagnostic;
use tessera_device::{AuditResult, Fingerprint, FingerprintHasher, MeshRank, WeightSource, describe_slice};
use tessera_ir::{ExpertTier, Op, Program, Type, WeightLoad};

use super::cuda_error;
use super::expert_tiers::ExpertTiers;
use super::rounding::{round_and_upload, upload_rounded};
use crate::device_memory::{ALIGNMENT, DeviceMemory, DeviceSlice, copy_to_host};
use crate::driver::CudaResult;

/// All weight shards of a rank, each stored once.
#[derive(Debug, Default)]
pub(super) struct DeviceWeights {
    shards: Vec<DeviceShard>,
    index: BTreeMap<ShardKey, usize>,
    /// Index and used bytes of the allocation that currently receives small tensors.
    open_block: Option<(usize, usize)>,
    blocks: Vec<DeviceMemory>,
    tiers: ExpertTiers,
    audit_cursor: AuditCursor,
}

type ShardKey = (String, String, Option<WeightLoad>, Option<ExpertTier>);

/// One weight shard, with its fingerprint at load.
#[derive(Debug)]
struct DeviceShard {
    name: String,
    ty: Type,
    load_transform: Option<WeightLoad>,
    storage: ShardStorage,
    fingerprint: Fingerprint,
}

/// The memory of a shard.
#[derive(Debug, Clone, Copy)]
enum ShardStorage {
    /// Device memory as a whole.
    Device(ShardPlace),
    /// Two tiers, by index of the weight there.
    Tiers(usize),
}

/// The place of a shard: an allocation and the offset of the shard in it.
#[derive(Debug, Clone, Copy)]
struct ShardPlace {
    block: usize,
    offset: u64,
}

/// Where the next audit step continues: the shard, the byte offset in it, and the hash of the bytes
/// before.
#[derive(Debug, Default)]
struct AuditCursor {
    shard: usize,
    offset: u64,
    hash: FingerprintHasher,
    host_buffer: Vec<u8>,
}

/// Bytes of a shared allocation. Separate allocations would waste up to 2 MiB per tensor.
const BLOCK_BYTES: usize = 256 << 20;

/// Bytes that one audit step downloads and hashes: a step takes less than half a millisecond, by which it may
/// delay the end of a wait for the device.
const AUDIT_READ_BYTES: u64 = 1 << 20;

/// An audit that proceeds while the host waits for the device.
#[derive(Debug, Default)]
pub(super) struct WaitingAudit {
    bytes_left: u64,
    done: AuditResult,
}

impl WaitingAudit {
    /// Replaces what is left of the last request, and returns what was done since then.
    pub(super) fn replace_request(&mut self, bytes: u64) -> AuditResult {
        self.bytes_left = bytes;
        std::mem::take(&mut self.done)
    }

    /// Hashes a step of the request. Returns `false` if nothing is left to do.
    pub(super) fn run_step(&mut self, weights: &mut DeviceWeights) -> bool {
        if self.bytes_left == 0 {
            return false;
        }
        let begun = Instant::now();
        let step = weights.audit_next(self.bytes_left.min(AUDIT_READ_BYTES), true);
        self.bytes_left = if step.bytes == 0 || step.rounds > 0 { 0 } else { self.bytes_left - step.bytes };
        let hidden_ns = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.done.merge(AuditResult { hidden_ns, ..step });
        true
    }
}

impl DeviceWeights {
    /// Returns the index of the shard that a weight op loads; reads it on first use.
    pub(super) fn load(
        &mut self,
        mesh_rank: &MeshRank,
        p: &Program,
        op: &Op,
        source: &mut dyn WeightSource,
    ) -> Result<usize, Diagnostic> {
        match (self.index.get(&weight_key(p, op)), op.expert_tier()) {
            (Some(i), _) => Ok(*i),
            (None, Some(tier)) => self.load_experts(mesh_rank, p, (op, tier), source),
            (None, None) => {
                let broken = |e| cuda_error(&format!("weight {}", weight_key(p, op).0), &e);
                let at =
                    self.allocate_bytes(p.type_of(op.results[0]).byte_size().0 as usize).map_err(broken)?;
                self.read_shard(mesh_rank, p, op, source, at)
            }
        }
    }

    /// Loads the weights of several ops into contiguous memory, unless one of them is loaded
    /// already. Returns whether the weights are contiguous; loaded weights do not move.
    pub(super) fn load_contiguous(
        &mut self,
        mesh_rank: &MeshRank,
        p: &Program,
        ops: &[&Op],
        source: &mut dyn WeightSource,
    ) -> Result<bool, Diagnostic> {
        let bytes = |op: &Op| p.type_of(op.results[0]).byte_size().0;
        if ops.iter().all(|op| !self.index.contains_key(&weight_key(p, op))) {
            let all: u64 = ops.iter().map(|op| bytes(op)).sum();
            let broken = |e| cuda_error(&format!("weight {}", weight_key(p, ops[0]).0), &e);
            let mut at = self.allocate_bytes(all as usize).map_err(broken)?;
            for op in ops {
                self.read_shard(mesh_rank, p, op, source, at)?;
                at.offset += bytes(op);
            }
        }
        let found: Option<Vec<u64>> =
            ops.iter().map(|op| Some(self.shard_address(*self.index.get(&weight_key(p, op))?))).collect();
        let Some(found) = found else { return Ok(false) };
        Ok(found.windows(2).zip(ops).all(|(pair, op)| pair[0] + bytes(op) == pair[1]))
    }

    /// Reads the shard of a weight op, uploads it to the place `at` and records its fingerprint.
    /// Returns the shard's index.
    fn read_shard(
        &mut self,
        mesh_rank: &MeshRank,
        p: &Program,
        op: &Op,
        source: &mut dyn WeightSource,
        at: ShardPlace,
    ) -> Result<usize, Diagnostic> {
        let (key, ty) = (weight_key(p, op), p.type_of(op.results[0]));
        let fingerprint = upload_weight(&self.blocks, at, (&key.0, ty, key.2), mesh_rank, source)?;
        Ok(self.add_shard(key, ty, ShardStorage::Device(at), fingerprint))
    }

    /// Reads the experts of a weight op into host memory. Returns the shard's index.
    fn load_experts(
        &mut self,
        mesh_rank: &MeshRank,
        p: &Program,
        (op, tier): (&Op, ExpertTier),
        source: &mut dyn WeightSource,
    ) -> Result<usize, Diagnostic> {
        let (key, ty) = (weight_key(p, op), p.type_of(op.results[0]));
        let weight = self.tiers.add_weight((&p.name, &key.0), (tier, ty), mesh_rank)?;
        let experts = source.open_experts(&key.0, ty, mesh_rank)?;
        let fingerprint = self.tiers.read_experts(weight, &*experts, mesh_rank)?;
        Ok(self.add_shard(key, ty, ShardStorage::Tiers(weight), fingerprint))
    }

    fn add_shard(
        &mut self,
        key: ShardKey,
        ty: &Type,
        storage: ShardStorage,
        fingerprint: Fingerprint,
    ) -> usize {
        let (name, ty, load_transform) = (key.0.clone(), ty.clone(), key.2);
        self.shards.push(DeviceShard { name, ty, load_transform, storage, fingerprint });
        self.index.insert(key, self.shards.len() - 1);
        self.shards.len() - 1
    }

    pub(super) fn tiers(&self) -> &ExpertTiers {
        &self.tiers
    }

    pub(super) fn tiers_mut(&mut self) -> &mut ExpertTiers {
        &mut self.tiers
    }

    /// Returns the index of a shard among the weights in two tiers; `None` for another one.
    pub(super) fn find_tiered(&self, i: usize) -> Option<usize> {
        match self.shards[i].storage {
            ShardStorage::Device(_) => None,
            ShardStorage::Tiers(weight) => Some(weight),
        }
    }

    /// Returns the address of a shard in device memory; of experts in two tiers, that of the pool.
    pub(super) fn shard_address(&self, i: usize) -> u64 {
        match self.shards[i].storage {
            ShardStorage::Device(ShardPlace { block, offset }) => {
                self.blocks[block].device_address() + offset
            }
            ShardStorage::Tiers(weight) => self.tiers.pool_address(weight),
        }
    }

    /// Returns the bytes of all shards in device memory.
    pub(super) fn total_bytes(&self) -> u64 {
        let bytes = |h: &DeviceShard| match h.storage {
            ShardStorage::Device(_) => h.ty.byte_size().0,
            ShardStorage::Tiers(weight) => self.tiers.pool_bytes(weight),
        };
        self.shards.iter().map(bytes).sum()
    }

    pub(super) fn list_fingerprints(&self) -> Vec<Fingerprint> {
        let mut all: Vec<Fingerprint> = self.shards.iter().map(|h| h.fingerprint.clone()).collect();
        all.sort();
        all.dedup();
        all
    }

    /// Hashes the next shards again, at most so many bytes. Stops before a shard that lies in two tiers if a run is in
    /// flight, because a run changes the pools.
    pub(super) fn audit_next(&mut self, bytes: u64, is_running: bool) -> AuditResult {
        let (mut audited, mut left) = (AuditResult::default(), bytes);
        let AuditCursor { shard: piece, offset, hash, host_buffer: stage } = &mut self.audit_cursor;
        while audited.rounds == 0
            && let Some(weight) = self.shards.get(*piece)
        {
            if is_running && matches!(weight.storage, ShardStorage::Tiers(_)) {
                break;
            }
            let size = AUDIT_READ_BYTES.min(weight.ty.byte_size().0 - *offset);
            // An unreadable device fails the next run, which reports the error.
            let memory = (&self.blocks[..], &self.tiers);
            if size > left || weight.hash_range(memory, *offset, size, hash, stage).is_err() {
                break;
            }
            left -= size;
            audited.bytes += size;
            *offset += size;
            if *offset < weight.ty.byte_size().0 {
                continue;
            }
            let found = std::mem::take(hash).digest();
            if found != weight.fingerprint.digest {
                audited.changed.get_or_insert_with(|| (weight.fingerprint.clone(), found));
            }
            *offset = 0;
            *piece += 1;
            if *piece == self.shards.len() {
                *piece = 0;
                audited.rounds = 1;
            }
        }
        audited
    }

    /// Hashes the shards in two tiers that are next, at most so many bytes. No run is in flight.
    pub(super) fn audit_next_tiers(&mut self, bytes: u64) -> AuditResult {
        let mut audited = AuditResult::default();
        let is_next = |own: &DeviceWeights| {
            let next = own.shards.get(own.audit_cursor.shard);
            next.is_some_and(|shard| matches!(shard.storage, ShardStorage::Tiers(_)))
        };
        while audited.rounds == 0 && is_next(self) {
            let step = self.audit_next((bytes - audited.bytes).min(AUDIT_READ_BYTES), false);
            if step.bytes == 0 {
                break;
            }
            audited.merge(step);
        }
        audited
    }

    pub(super) fn reload_all(
        &mut self,
        mesh_rank: &MeshRank,
        source: &mut dyn WeightSource,
    ) -> Result<(), Diagnostic> {
        for h in &self.shards {
            source.check(&h.name, &h.ty, h.load_transform.map(WeightLoad::name), mesh_rank)?;
        }
        (self.audit_cursor.shard, self.audit_cursor.offset, self.audit_cursor.hash) =
            (0, 0, FingerprintHasher::default());
        for h in &mut self.shards {
            h.fingerprint = match h.storage {
                ShardStorage::Device(at) => {
                    let weight = (h.name.as_str(), &h.ty, h.load_transform);
                    upload_weight(&self.blocks, at, weight, mesh_rank, source)?
                }
                ShardStorage::Tiers(weight) => {
                    let experts = source.open_experts(&h.name, &h.ty, mesh_rank)?;
                    self.tiers.read_experts(weight, &*experts, mesh_rank)?
                }
            };
        }
        Ok(())
    }

    pub(super) fn overwrite_element(&mut self, name: &str, index: u64, value: f32) -> bool {
        let found = self.shards.iter().find(|h| h.name == name && index < h.ty.element_count());
        found.is_some_and(|h| {
            let width = h.ty.dtype.element_bytes() as usize;
            let written = match h.storage {
                ShardStorage::Device(at) => shard_memory(&self.blocks, at, &h.ty)
                    .and_then(|all| all.sub_slice(index as usize * width, width))
                    .and_then(|to| upload_rounded(to, h.ty.dtype, &[value])),
                ShardStorage::Tiers(weight) => self.tiers.overwrite_element(weight, index, value),
            };
            written.is_ok()
        })
    }

    /// Allocates memory for a tensor and returns its place.
    fn allocate_bytes(&mut self, bytes: usize) -> CudaResult<ShardPlace> {
        let need = bytes.next_multiple_of(ALIGNMENT as usize);
        if need > BLOCK_BYTES / 4 {
            self.blocks.push(DeviceMemory::new(need)?);
            return Ok(ShardPlace { block: self.blocks.len() - 1, offset: 0 });
        }
        let (block, full) = match self.open_block {
            Some((block, full)) if full + need <= BLOCK_BYTES => (block, full),
            _ => {
                self.blocks.push(DeviceMemory::new(BLOCK_BYTES)?);
                (self.blocks.len() - 1, 0)
            }
        };
        self.open_block = Some((block, full + need));
        Ok(ShardPlace { block, offset: full as u64 })
    }
}

/// Reads a weight, given by its name, type and transformation, uploads it and returns its fingerprint.
fn upload_weight(
    blocks: &[DeviceMemory],
    at: ShardPlace,
    (name, ty, load): (&str, &Type, Option<WeightLoad>),
    mesh_rank: &MeshRank,
    source: &mut dyn WeightSource,
) -> Result<Fingerprint, Diagnostic> {
    let load = load.map(WeightLoad::name);
    let data = source.read(name, ty, load, mesh_rank)?;
    let mut hash = FingerprintHasher::default();
    shard_memory(blocks, at, ty)
        .and_then(|to| round_and_upload(to, ty.dtype, &data, Some(&mut hash)))
        .map_err(|e| cuda_error(&format!("weight {name}"), &e))?;
    Ok(hash.finish(name, describe_slice(ty, load, mesh_rank)))
}

/// Returns the bytes of a shard.
fn shard_memory<'a>(
    blocks: &'a [DeviceMemory],
    at: ShardPlace,
    ty: &Type,
) -> CudaResult<DeviceSlice<'a, u8>> {
    blocks[at.block].slice(at.offset, ty.byte_size().0 as usize)
}

/// Returns the identity of a weight: its name, its type, the transformation of the stored tensor, and
/// its tiers.
fn weight_key(p: &Program, op: &Op) -> ShardKey {
    let name = op.name.clone().unwrap_or_default();
    (name, p.type_of(op.results[0]).display_on(&p.mesh), op.weight_load(), op.expert_tier())
}

impl DeviceShard {
    fn hash_range(
        &self,
        (blocks, tiers): (&[DeviceMemory], &ExpertTiers),
        offset: u64,
        size: u64,
        hash: &mut FingerprintHasher,
        stage: &mut Vec<u8>,
    ) -> CudaResult<()> {
        stage.resize(size as usize, 0);
        match self.storage {
            ShardStorage::Device(at) => {
                let bytes = shard_memory(blocks, at, &self.ty)?;
                copy_to_host(stage, bytes.sub_slice(offset as usize, size as usize)?)?;
            }
            ShardStorage::Tiers(weight) => tiers.read_bytes(weight, offset, stage)?,
        }
        hash.update_raw(stage, self.ty.dtype);
        Ok(())
    }
}
