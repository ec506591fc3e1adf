//! Weights in memory: reading pieces, their fingerprints, looking at them again, exchanging them.

use std::collections::BTreeMap;

use tessera_base::Diagnostic;
use tessera_device::{Audited, Fingerprint, Hasher, Seat, WeightSource, numbers, slice_words};
use tessera_ir::{DType, Op, Program, Type};

use super::refused;
use crate::driver::{Done, Memory, download, upload};

/// All weights of a rank, each held once.
#[derive(Debug, Default)]
pub(super) struct Weights {
    held: Vec<Held>,
    index: BTreeMap<Key, usize>,
    /// The last block that small tensors share, and how far it is full.
    block: Option<(usize, usize)>,
    blocks: Vec<Memory>,
    cursor: Cursor,
}

type Key = (String, String, Option<String>);

/// A piece of a tensor.
#[derive(Debug)]
struct Held {
    name: String,
    ty: Type,
    load: Option<String>,
    at: u64,
    print: Fingerprint,
}

/// How far the look at the weights has come.
#[derive(Debug, Default)]
struct Cursor {
    piece: usize,
    offset: u64,
    hash: Hasher,
    stage: Vec<u8>,
}

/// Bytes of one allocation: an allocation each would waste up to 2 MiB a tensor.
const BLOCK_BYTES: usize = 256 << 20;

/// Bytes that are brought back and hashed at once.
const UNIT_BYTES: u64 = 4 << 20;

impl Weights {
    /// The held weight of a weight op, read if it is not held yet.
    pub(super) fn load(
        &mut self,
        seat: &Seat,
        p: &Program,
        op: &Op,
        source: &mut dyn WeightSource,
    ) -> Result<usize, Diagnostic> {
        match self.index.get(&key(p, op)) {
            Some(i) => Ok(*i),
            None => {
                let broken = |e| refused(&format!("weight {}", key(p, op).0), &e);
                let at = self.take(p.ty(op.results[0]).bytes().0 as usize).map_err(broken)?;
                self.read(seat, p, op, source, at)
            }
        }
    }

    /// Reads weights that are not held yet behind one another. Whether they lie so: those that were held lie where they lie.
    pub(super) fn beside(
        &mut self,
        seat: &Seat,
        p: &Program,
        ops: &[&Op],
        source: &mut dyn WeightSource,
    ) -> Result<bool, Diagnostic> {
        let bytes = |op: &Op| p.ty(op.results[0]).bytes().0;
        if ops.iter().all(|op| !self.index.contains_key(&key(p, op))) {
            let all: u64 = ops.iter().map(|op| bytes(op)).sum();
            let broken = |e| refused(&format!("weight {}", key(p, ops[0]).0), &e);
            let mut at = self.take(all as usize).map_err(broken)?;
            for op in ops {
                self.read(seat, p, op, source, at)?;
                at += bytes(op);
            }
        }
        let found: Option<Vec<u64>> =
            ops.iter().map(|op| Some(self.at(*self.index.get(&key(p, op))?))).collect();
        let Some(found) = found else { return Ok(false) };
        Ok(found.windows(2).zip(ops).all(|(pair, op)| pair[0] + bytes(op) == pair[1]))
    }

    /// Reads a weight to a place.
    fn read(
        &mut self,
        seat: &Seat,
        p: &Program,
        op: &Op,
        source: &mut dyn WeightSource,
        at: u64,
    ) -> Result<usize, Diagnostic> {
        let (key, ty) = (key(p, op), p.ty(op.results[0]));
        let (name, load) = (key.0.clone(), key.2.clone());
        let data = source.read(&name, ty, load.as_deref(), seat)?;
        let broken = |e| refused(&format!("weight {name}"), &e);
        let hash = put_digested(at, ty.dtype, &data).map_err(broken)?;
        let print = hash.finish(&name, slice_words(ty, load.as_deref(), seat));
        self.held.push(Held { name: name.clone(), ty: ty.clone(), load, at, print });
        self.index.insert(key, self.held.len() - 1);
        Ok(self.held.len() - 1)
    }

    pub(super) fn at(&self, i: usize) -> u64 {
        self.held[i].at
    }

    pub(super) fn bytes(&self) -> u64 {
        self.held.iter().map(|h| h.ty.bytes().0).sum()
    }

    pub(super) fn prints(&self) -> Vec<Fingerprint> {
        let mut all: Vec<Fingerprint> = self.held.iter().map(|h| h.print.clone()).collect();
        all.sort();
        all.dedup();
        all
    }

    pub(super) fn look(&mut self, bytes: u64) -> Audited {
        let (mut seen, mut left) = (Audited::default(), bytes);
        let Cursor { piece, offset, hash, stage } = &mut self.cursor;
        while seen.rounds == 0
            && let Some(held) = self.held.get(*piece)
        {
            let size = UNIT_BYTES.min(held.ty.bytes().0 - *offset);
            // What cannot be read any more is told by the next run.
            if size > left || held.feed(*offset, size, hash, stage).is_err() {
                break;
            }
            left -= size;
            seen.bytes += size;
            *offset += size;
            if *offset < held.ty.bytes().0 {
                continue;
            }
            let found = std::mem::take(hash).digest();
            if found != held.print.digest {
                seen.changed.get_or_insert_with(|| (held.print.clone(), found));
            }
            *offset = 0;
            *piece += 1;
            if *piece == self.held.len() {
                *piece = 0;
                seen.rounds = 1;
            }
        }
        seen
    }

    pub(super) fn exchange(&mut self, seat: &Seat, source: &mut dyn WeightSource) -> Result<(), Diagnostic> {
        for h in &self.held {
            source.check(&h.name, &h.ty, h.load.as_deref(), seat)?;
        }
        (self.cursor.piece, self.cursor.offset, self.cursor.hash) = (0, 0, Hasher::default());
        for h in &mut self.held {
            let data = source.read(&h.name, &h.ty, h.load.as_deref(), seat)?;
            let name = h.name.clone();
            let broken = |e| refused(&format!("weight {name}"), &e);
            let hash = put_digested(h.at, h.ty.dtype, &data).map_err(broken)?;
            h.print = hash.finish(&h.name, slice_words(&h.ty, h.load.as_deref(), seat));
        }
        Ok(())
    }

    pub(super) fn poke(&mut self, name: &str, index: u64, value: f32) -> bool {
        let found = self.held.iter().find(|h| h.name == name && index < h.ty.elements());
        found.is_some_and(|h| put(h.at + index * h.ty.dtype.bytes(), h.ty.dtype, &[value]).is_ok())
    }

    /// Memory for a tensor.
    fn take(&mut self, bytes: usize) -> Done<u64> {
        let need = bytes.next_multiple_of(super::ALIGNMENT as usize);
        if need > BLOCK_BYTES / 4 {
            let own = Memory::new(need)?;
            let at = own.at();
            self.blocks.push(own);
            return Ok(at);
        }
        let (block, full) = match self.block {
            Some((block, full)) if full + need <= BLOCK_BYTES => (block, full),
            _ => {
                self.blocks.push(Memory::new(BLOCK_BYTES)?);
                (self.blocks.len() - 1, 0)
            }
        };
        self.block = Some((block, full + need));
        Ok(self.blocks[block].at() + full as u64)
    }
}

/// What a weight op asks for: name, type, and how it is made of what is stored.
fn key(p: &Program, op: &Op) -> Key {
    let name = op.name.clone().unwrap_or_default();
    (name, p.ty(op.results[0]).display(&p.mesh), op.str("load").map(str::to_string))
}

impl Held {
    fn feed(&self, offset: u64, size: u64, hash: &mut Hasher, stage: &mut Vec<u8>) -> Done<()> {
        stage.resize(size as usize, 0);
        download(stage, self.at + offset)?;
        hash.update_held(stage, self.ty.dtype.bytes() as usize);
        Ok(())
    }
}

/// Elements that are rounded and sent at once: the host works on the next while nothing waits, and no tensor is held twice.
const PART: usize = 16 << 20;

/// Rounds elements and sends them.
pub(super) fn put(at: u64, dtype: DType, data: &[f32]) -> Done<()> {
    send(at, dtype, data, None)
}

/// The same, and digests what was sent: a look at the device compares with that.
fn put_digested(at: u64, dtype: DType, data: &[f32]) -> Done<Hasher> {
    let mut hash = Hasher::default();
    send(at, dtype, data, Some(&mut hash))?;
    Ok(hash)
}

fn send(at: u64, dtype: DType, data: &[f32], mut hash: Option<&mut Hasher>) -> Done<()> {
    let (width, mut bytes) = (dtype.bytes() as usize, Vec::new());
    for (i, part) in data.chunks(PART).enumerate() {
        bytes.resize(part.len() * width, 0);
        round(dtype, part, &mut bytes);
        // One core digests while another sends.
        std::thread::scope(|s| {
            if let Some(hash) = &mut hash {
                s.spawn(|| hash.update_held(&bytes, width));
            }
            upload(at + (i * PART * width) as u64, &bytes)
        })?;
    }
    Ok(())
}

/// Elements in a dtype, little-endian, by all cores: 14 billion of them take one core half a minute.
fn round(dtype: DType, from: &[f32], to: &mut [u8]) {
    let width = dtype.bytes() as usize;
    let one = |from: &[f32], to: &mut [u8]| match dtype {
        DType::Bf16 => {
            to.as_chunks_mut::<2>()
                .0
                .iter_mut()
                .zip(from)
                .for_each(|(o, v)| *o = numbers::bf16(*v).to_le_bytes());
        }
        DType::E4m3 => to.iter_mut().zip(from).for_each(|(o, v)| *o = numbers::e4m3(*v)),
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
