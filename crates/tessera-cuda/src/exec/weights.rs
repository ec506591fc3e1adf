//! Weights in device memory: loading shards, fingerprinting them, auditing them against their
//! fingerprints, and reloading them.

use std::collections::BTreeMap;
use std::time::Instant;

use tessera_base::Diagnostic;
use tessera_device::{
    AuditResult, Fingerprint, FingerprintHasher, MeshRank, WeightSource, describe_slice, dtype,
};
use tessera_ir::{DType, Op, Program, Type, WeightLoad};

use super::cuda_error;
use crate::device_memory::{ALIGNMENT, DeviceMemory, DeviceSlice, copy_to_device, copy_to_host};
use crate::driver::CudaResult;

/// All weight shards of a rank, each stored once.
#[derive(Debug, Default)]
pub(super) struct DeviceWeights {
    shards: Vec<DeviceShard>,
    index: BTreeMap<ShardKey, usize>,
    /// Index and used bytes of the allocation that currently receives small tensors.
    open_block: Option<(usize, usize)>,
    blocks: Vec<DeviceMemory>,
    audit_cursor: AuditCursor,
}

type ShardKey = (String, String, Option<WeightLoad>);

/// One weight shard in device memory, with its fingerprint at load.
#[derive(Debug)]
struct DeviceShard {
    name: String,
    ty: Type,
    load_transform: Option<WeightLoad>,
    place: ShardPlace,
    fingerprint: Fingerprint,
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
        let step = weights.audit_next(self.bytes_left.min(AUDIT_READ_BYTES));
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
        match self.index.get(&weight_key(p, op)) {
            Some(i) => Ok(*i),
            None => {
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
        self.shards.push(DeviceShard {
            name: key.0.clone(),
            ty: ty.clone(),
            load_transform: key.2,
            place: at,
            fingerprint,
        });
        self.index.insert(key, self.shards.len() - 1);
        Ok(self.shards.len() - 1)
    }

    pub(super) fn shard_address(&self, i: usize) -> u64 {
        let ShardPlace { block, offset } = self.shards[i].place;
        self.blocks[block].device_address() + offset
    }

    pub(super) fn total_bytes(&self) -> u64 {
        self.shards.iter().map(|h| h.ty.byte_size().0).sum()
    }

    pub(super) fn list_fingerprints(&self) -> Vec<Fingerprint> {
        let mut all: Vec<Fingerprint> = self.shards.iter().map(|h| h.fingerprint.clone()).collect();
        all.sort();
        all.dedup();
        all
    }

    pub(super) fn audit_next(&mut self, bytes: u64) -> AuditResult {
        let (mut audited, mut left) = (AuditResult::default(), bytes);
        let AuditCursor { shard: piece, offset, hash, host_buffer: stage } = &mut self.audit_cursor;
        while audited.rounds == 0
            && let Some(weight) = self.shards.get(*piece)
        {
            let size = AUDIT_READ_BYTES.min(weight.ty.byte_size().0 - *offset);
            // An unreadable device fails the next run, which reports the error.
            if size > left || weight.hash_range(&self.blocks, *offset, size, hash, stage).is_err() {
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
            let weight = (h.name.as_str(), &h.ty, h.load_transform);
            h.fingerprint = upload_weight(&self.blocks, h.place, weight, mesh_rank, source)?;
        }
        Ok(())
    }

    pub(super) fn overwrite_element(&mut self, name: &str, index: u64, value: f32) -> bool {
        let found = self.shards.iter().find(|h| h.name == name && index < h.ty.element_count());
        found.is_some_and(|h| {
            let width = h.ty.dtype.element_bytes() as usize;
            shard_memory(&self.blocks, h.place, &h.ty)
                .and_then(|all| all.sub_slice(index as usize * width, width))
                .and_then(|to| upload_rounded(to, h.ty.dtype, &[value]))
                .is_ok()
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

/// Returns the identity of a weight: its name, its type, and the transformation of the stored
/// tensor.
fn weight_key(p: &Program, op: &Op) -> ShardKey {
    let name = op.name.clone().unwrap_or_default();
    (name, p.type_of(op.results[0]).display_on(&p.mesh), op.weight_load())
}

impl DeviceShard {
    fn hash_range(
        &self,
        blocks: &[DeviceMemory],
        offset: u64,
        size: u64,
        hash: &mut FingerprintHasher,
        stage: &mut Vec<u8>,
    ) -> CudaResult<()> {
        stage.resize(size as usize, 0);
        let bytes = shard_memory(blocks, self.place, &self.ty)?;
        copy_to_host(stage, bytes.sub_slice(offset as usize, size as usize)?)?;
        hash.update_raw(stage, self.ty.dtype);
        Ok(())
    }
}

/// Elements per upload. Chunking lets the host convert one chunk while it hashes and uploads, and
/// avoids a second full copy of a tensor in host memory.
const UPLOAD_ELEMENTS: usize = 16 << 20;

/// Rounds elements to a dtype and uploads them.
pub(super) fn upload_rounded(to: DeviceSlice<'_, u8>, dtype: DType, data: &[f32]) -> CudaResult<()> {
    round_and_upload(to, dtype, data, None)
}

/// Uploads elements like [`upload_rounded`], and adds the uploaded bytes to a hash, which audits compare
/// with the device.
fn round_and_upload(
    to: DeviceSlice<'_, u8>,
    dtype: DType,
    data: &[f32],
    mut hash: Option<&mut FingerprintHasher>,
) -> CudaResult<()> {
    let (width, mut bytes) = (dtype.element_bytes() as usize, Vec::new());
    for (i, part) in data.chunks(UPLOAD_ELEMENTS).enumerate() {
        bytes.resize(part.len() * width, 0);
        round_to_dtype(dtype, part, &mut bytes);
        // One core hashes while another uploads.
        std::thread::scope(|s| {
            if let Some(hash) = &mut hash {
                s.spawn(|| hash.update_raw(&bytes, dtype));
            }
            copy_to_device(to.sub_slice(i * UPLOAD_ELEMENTS * width, bytes.len())?, &bytes)
        })?;
    }
    Ok(())
}

/// Rounds elements to a dtype, little-endian, on all cores: one core would take half a minute for
/// 14 billion elements.
fn round_to_dtype(dtype: DType, from: &[f32], to: &mut [u8]) {
    let width = dtype.element_bytes() as usize;
    let one = |from: &[f32], to: &mut [u8]| match dtype {
        DType::Bf16 => {
            to.as_chunks_mut::<2>()
                .0
                .iter_mut()
                .zip(from)
                .for_each(|(o, v)| *o = dtype::to_bf16_bits(*v).to_le_bytes());
        }
        DType::E4m3 => to.iter_mut().zip(from).for_each(|(o, v)| *o = dtype::to_e4m3_bits(*v)),
        _ => to.as_chunks_mut::<4>().0.iter_mut().zip(from).for_each(|(o, v)| *o = v.to_le_bytes()),
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let share = from.len().div_ceil(cores).max(64 << 10);
    if share >= from.len() {
        return one(from, to);
    }
    std::thread::scope(|s| {
        for (from, to) in from.chunks(share).zip(to.chunks_mut(share * width)) {
            s.spawn(move || one(from, to));
        }
    });
}
