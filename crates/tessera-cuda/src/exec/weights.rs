//! Weights in memory: reading pieces, their fingerprints, looking at them again, exchanging them.

use std::collections::BTreeMap;

use tessera_base::Diagnostic;
use tessera_device::{Audited, Fingerprint, Hasher, Seat, WeightSource, slice_words};
use tessera_ir::{DType, Op, Program, Type};

use super::{narrowed, refused};
use crate::driver::{Done, Memory, download, upload};

/// All weights of a rank, each held once.
#[derive(Debug, Default)]
pub(super) struct Weights {
    held: Vec<Held>,
    index: BTreeMap<(String, String, Option<String>), usize>,
    /// The last block that small tensors share, and how far it is full.
    block: Option<(usize, usize)>,
    blocks: Vec<Memory>,
    cursor: Cursor,
}

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
        let (name, ty) = (op.name.clone().unwrap_or_default(), p.ty(op.results[0]));
        let load = op.str("load").map(str::to_string);
        let key = (name.clone(), ty.display(&p.mesh), load.clone());
        if let Some(i) = self.index.get(&key) {
            return Ok(*i);
        }
        let data = source.read(&name, ty, load.as_deref(), seat)?;
        let broken = |e| refused(&format!("weight {name}"), &e);
        let at = self.take(ty.bytes().0 as usize).map_err(broken)?;
        put(at, ty.dtype, &data).map_err(broken)?;
        let mut held =
            Held { name: name.clone(), ty: ty.clone(), load, at, print: Hasher::default().finish("", "") };
        held.print = held.fingerprint(seat, &mut self.cursor.stage).map_err(broken)?;
        self.held.push(held);
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
            put(h.at, h.ty.dtype, &data).map_err(broken)?;
            h.print = h.fingerprint(seat, &mut self.cursor.stage).map_err(broken)?;
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

impl Held {
    fn feed(&self, offset: u64, size: u64, hash: &mut Hasher, stage: &mut Vec<u8>) -> Done<()> {
        stage.resize(size as usize, 0);
        download(stage, self.at + offset)?;
        hash.update_held(stage, self.ty.dtype.bytes() as usize);
        Ok(())
    }

    /// Of what is on the device, after whatever rounding brought it there.
    fn fingerprint(&self, seat: &Seat, stage: &mut Vec<u8>) -> Done<Fingerprint> {
        let (mut hash, mut offset) = (Hasher::default(), 0);
        while offset < self.ty.bytes().0 {
            let size = UNIT_BYTES.min(self.ty.bytes().0 - offset);
            self.feed(offset, size, &mut hash, stage)?;
            offset += size;
        }
        Ok(hash.finish(&self.name, slice_words(&self.ty, self.load.as_deref(), seat)))
    }
}

fn put(at: u64, dtype: DType, data: &[f32]) -> Done<()> {
    match dtype {
        DType::Bf16 => upload(at, &narrowed(data)),
        DType::E4m3 => upload(at, &data.iter().map(|v| e4m3(*v)).collect::<Vec<u8>>()),
        _ => upload(at, data),
    }
}

/// To the nearest number of 4 exponent and 3 mantissa bits, ties to even, the largest (448) for what lies beyond.
fn e4m3(v: f32) -> u8 {
    let sign = if v.is_sign_negative() { 0x80 } else { 0 };
    let a = v.abs();
    if a.is_nan() {
        return sign | 0x7f;
    }
    // Below 2^-6 steps are 2^-9; above, an eighth of the power of two.
    let exponent = (a.to_bits() >> 23) as i32 - 127;
    let step = (exponent.max(-6) - 3) as f32;
    let units = (a / step.exp2()).round_ties_even();
    let rounded = units * step.exp2();
    if rounded >= 448.0 {
        return sign | 0x7e;
    }
    if rounded < 2.0_f32.powi(-6) {
        return sign | units as u8;
    }
    let e = (rounded.to_bits() >> 23) as i32 - 127;
    let mantissa = (rounded / (e as f32).exp2() * 8.0) as u8 - 8;
    sign | (((e + 7) as u8) << 3) | mantissa
}

#[cfg(test)]
mod tests {
    use super::e4m3;

    /// What the bits mean.
    fn value(bits: u8) -> f32 {
        let (e, m) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
        let v = if e == 0 { m * 2.0_f32.powi(-9) } else { (8.0 + m) * 2.0_f32.powi(e - 10) };
        if bits & 0x80 == 0 { v } else { -v }
    }

    #[test]
    fn every_number_is_its_own_nearest_and_those_between_go_to_the_nearer() {
        for bits in (0..=0x7e_u8).chain(0x80..=0xfe) {
            assert_eq!(e4m3(value(bits)), bits, "{bits:#x}");
        }
        for bits in 0..0x7e_u8 {
            let (a, b) = (value(bits), value(bits + 1));
            assert_eq!(e4m3(a + (b - a) * 0.49), bits);
            assert_eq!(e4m3(a + (b - a) * 0.51), bits + 1);
            let even = if bits % 2 == 0 { bits } else { bits + 1 };
            assert_eq!(e4m3((a + b) / 2.0), even);
        }
        assert_eq!([e4m3(1e9), e4m3(-1e9), e4m3(460.0)], [0x7e, 0xfe, 0x7e]);
    }
}
