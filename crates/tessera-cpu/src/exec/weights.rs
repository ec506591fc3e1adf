//! Weights in memory: reading pieces, their fingerprints, looking at them again, exchanging them.

use tessera_base::Diagnostic;
use tessera_base::random::{DrawKey, normals};
use tessera_device::{Audited, Fingerprint, Hasher, Seat, WeightSource, slice_words};
use tessera_ir::{Op, Opcode, Program, Type};

use super::{Cpu, Held, WeightKey};
use crate::Pool;
use crate::kernels::{PackedWeight, ROWS_AT_ONCE, RopeSpec, RopeTables, time_embed};

/// Where a held weight came from, and what it was then.
#[derive(Debug)]
pub(super) struct Piece {
    name: String,
    ty: Type,
    load: Option<String>,
    print: Fingerprint,
}

/// How far the look at the weights has come.
#[derive(Debug, Default)]
pub(super) struct Cursor {
    piece: usize,
    unit: usize,
    hash: Hasher,
    /// Rows taken out of a packed weight.
    rows: Vec<f32>,
}

impl Cpu {
    /// The held weight of a weight op, read if it is not held yet.
    pub(super) fn load_weight(
        &mut self,
        p: &Program,
        op: &Op,
        source: &mut dyn WeightSource,
    ) -> Result<usize, Diagnostic> {
        let (name, v) = (op.name.clone().unwrap_or_default(), op.results[0]);
        let ty = p.ty(v);
        let only_products = p.ops.iter().filter(|o| o.uses().any(|u| u == v)).all(|o| {
            let elsewhere = o.uses().filter(|u| *u == v).count() > 1;
            o.opcode == Opcode::Matmul && o.operands[1] == v && !elsewhere
        });
        let packed = only_products && ty.shape.len() == 2;
        let mut key = WeightKey {
            ty: ty.display(&p.mesh).to_string(),
            load: op.str("load").map(str::to_string),
            packed,
            name,
        };
        if let Some(i) = self.weight_index.get(&key) {
            return Ok(*i);
        }
        if packed {
            // A product reads a plain weight too; the other way round it is read once more.
            key.packed = false;
            if let Some(i) = self.weight_index.get(&key) {
                return Ok(*i);
            }
            key.packed = true;
        }
        let mut piece = Piece {
            name: key.name.clone(),
            ty: ty.clone(),
            load: key.load.clone(),
            print: Hasher::default().finish("", ""),
        };
        let held = piece.read(&self.pool, &self.seat, packed, source, &mut self.cursor.rows)?;
        self.memory.weights.push(held);
        self.pieces.push(piece);
        self.weight_index.insert(key, self.memory.weights.len() - 1);
        Ok(self.memory.weights.len() - 1)
    }

    /// Fingerprints of the tables that an op's kernel derives from constants alone. Nothing of them is kept from load
    /// to run, and what is kept between runs depends on the call; so a probe of each stands for all: it differs where
    /// the arithmetic behind it does.
    pub(super) fn derive(&mut self, p: &Program, op: &Op) {
        let tensor = match op.opcode {
            Opcode::Rope => {
                let grid = op.ints("grid").unwrap_or(&[1, 1, 1]);
                let (head, stride) = (op.int("head_dim").unwrap_or(0), op.int("frame_stride").unwrap_or(1));
                format!("(rope table, head {head}, grid {grid:?}, stride {stride})")
            }
            Opcode::TimeEmbed => {
                let width = p.ty(op.results[0]).shape.last().copied().unwrap_or(0);
                format!("(time table, width {width})")
            }
            Opcode::Renoise => DRAWS.to_string(),
            _ => return,
        };
        if self.derived.iter().any(|f| f.tensor == tensor) {
            return;
        }
        let mut hash = Hasher::default();
        match op.opcode {
            Opcode::Rope => {
                let grid = op.ints("grid").unwrap_or(&[1, 1, 1]);
                let tables = RopeTables::new(RopeSpec {
                    head_dim: op.int("head_dim").unwrap_or(0) as usize,
                    grid: [grid[0] as usize, grid[1] as usize, grid[2] as usize],
                    start: PROBE,
                    frame_stride: op.int("frame_stride").unwrap_or(1),
                });
                hash.update_wide(tables.turns());
            }
            Opcode::TimeEmbed => {
                let width = p.ty(op.results[0]).shape.last().copied().unwrap_or(0) as usize;
                let mut out = vec![0.0; 2 * width];
                time_embed(&mut out, &[PROBE as f32, 0.5]);
                hash.update(&out);
            }
            _ => {
                let mut out = vec![0.0; 1024];
                normals(DrawKey { seed: PROBE as u64, chunk: 1, draw: 2 }, 0, &mut out);
                hash.update(&out);
            }
        }
        self.derived.push(hash.finish(tensor, "whole"));
    }

    pub(super) fn prints(&self) -> Vec<Fingerprint> {
        let mut all: Vec<Fingerprint> =
            self.pieces.iter().map(|p| &p.print).chain(&self.derived).cloned().collect();
        // A tensor held packed and plain is one piece; were its two copies to differ, both would be told.
        all.sort();
        all.dedup();
        all
    }

    pub(super) fn look(&mut self, bytes: u64) -> Audited {
        let (mut seen, mut left) = (Audited::default(), bytes);
        let Cursor { piece, unit, hash, rows } = &mut self.cursor;
        while seen.rounds == 0
            && let Some(held) = self.memory.weights.get(*piece)
        {
            let size = held.unit_bytes(*unit);
            if size > left {
                break;
            }
            held.feed(*unit, hash, rows);
            left -= size;
            seen.bytes += size;
            *unit += 1;
            if *unit < held.units() {
                continue;
            }
            let (print, found) = (&self.pieces[*piece].print, std::mem::take(hash).digest());
            if found != print.digest {
                seen.changed.get_or_insert_with(|| (print.clone(), found));
            }
            *unit = 0;
            *piece += 1;
            if *piece == self.memory.weights.len() {
                *piece = 0;
                seen.rounds = 1;
            }
        }
        seen
    }

    pub(super) fn exchange(&mut self, source: &mut dyn WeightSource) -> Result<(), Diagnostic> {
        for p in &self.pieces {
            source.check(&p.name, &p.ty, p.load.as_deref(), &self.seat)?;
        }
        self.cursor = Cursor::default();
        for (piece, held) in self.pieces.iter_mut().zip(&mut self.memory.weights) {
            let packed = matches!(held, Held::Packed(_));
            *held = piece.read(&self.pool, &self.seat, packed, source, &mut self.cursor.rows)?;
        }
        Ok(())
    }

    pub(super) fn poke(&mut self, name: &str, index: u64, value: f32) -> bool {
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        self.pieces.iter().zip(&mut self.memory.weights).filter(|(p, _)| p.name == name).any(|(_, held)| {
            match held {
                Held::Packed(w) => w.set(index, value),
                Held::Plain(v) => v.get_mut(index).map(|x| *x = value).is_some(),
            }
        })
    }
}

/// Where tables are probed: a position, a timestep, a seed.
const PROBE: i64 = 1021;

/// Random numbers come from a counter and have no state; what may differ is the arithmetic from bits to normals.
const DRAWS: &str = "(normal draws)";

/// Elements of a plain weight that are hashed at once.
const UNIT: usize = 16 << 10;

impl Piece {
    /// Reads the piece and takes its fingerprint from memory, after whatever packing does to it.
    fn read(
        &mut self,
        pool: &Pool,
        seat: &Seat,
        packed: bool,
        source: &mut dyn WeightSource,
        rows: &mut Vec<f32>,
    ) -> Result<Held, Diagnostic> {
        let load = self.load.as_deref();
        let data = source.read(&self.name, &self.ty, load, seat)?;
        let held = match self.ty.shape[..] {
            [n, k] if packed => Held::Packed(PackedWeight::new(pool, &data, n as usize, k as usize)),
            _ => Held::Plain(data),
        };
        let mut hash = Hasher::default();
        (0..held.units()).for_each(|unit| held.feed(unit, &mut hash, rows));
        self.print = hash.finish(&self.name, slice_words(&self.ty, load, seat));
        Ok(held)
    }
}

impl Held {
    fn units(&self) -> usize {
        match self {
            Held::Plain(v) => v.len().div_ceil(UNIT).max(1),
            Held::Packed(p) => p.shape().0.div_ceil(ROWS_AT_ONCE).max(1),
        }
    }

    fn unit_bytes(&self, unit: usize) -> u64 {
        let elements = match self {
            Held::Plain(v) => (v.len() - unit * UNIT).min(UNIT),
            Held::Packed(p) => (p.shape().0 - unit * ROWS_AT_ONCE).min(ROWS_AT_ONCE) * p.shape().1,
        };
        elements as u64 * 4
    }

    /// Hashes one unit, in the order of the tensor's elements.
    fn feed(&self, unit: usize, hash: &mut Hasher, rows: &mut Vec<f32>) {
        match self {
            Held::Plain(v) => hash.update(v.chunks(UNIT).nth(unit).unwrap_or_default()),
            Held::Packed(p) => {
                p.unpack(unit * ROWS_AT_ONCE, rows);
                hash.update(rows);
            }
        }
    }
}
