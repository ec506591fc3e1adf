//! Weights that nobody trained, for benchmarks: made of names, the same on every mesh.

use std::collections::BTreeMap;

use tessera_base::Diagnostic;
use tessera_base::random::{DrawKey, normals};
use tessera_device::{Seat, WeightSource, numbers};
use tessera_ir::Type;

/// Weights that nobody trained: normals of a tensor's name, small as trained ones are; norms near one.
#[derive(Debug, Clone, Default)]
pub struct Synthetic {
    /// Width of the rows of tensors that are scaled, by name: a tensor is read before its scales.
    inner: BTreeMap<String, u64>,
}

/// Size of a weight.
const DEVIATION: f32 = 0.02;

impl WeightSource for Synthetic {
    fn read(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        seat: &Seat,
    ) -> Result<Vec<f32>, Diagnostic> {
        if load == Some("e4m3.scale") {
            // Of the rows that this vector scales, which are whole on the rank.
            let inner = self.inner.get(name).copied().unwrap_or(1);
            let rows =
                Type { dtype: tessera_ir::DType::F32, shape: vec![ty.shape[0], inner], layout: ty.layout };
            return self.read(name, &rows, None, seat).map(|w| numbers::scales_of(&w, inner as usize));
        }
        if load == Some("e4m3") {
            self.inner.insert(name.to_string(), ty.shape[1]);
            let mut w = self.read(name, ty, None, seat)?;
            numbers::over_scales(&mut w, ty.shape[1] as usize);
            return Ok(w);
        }
        let mut out = global_normals(name, ty, seat);
        let norm = name.contains("norm") && name.ends_with(".weight");
        let center = if norm { 1.0 } else { 0.0 };
        let parts: Vec<&mut [f32]> = out.chunks_mut(PIECE).collect();
        in_parallel(parts, &|part: &mut [f32]| part.iter_mut().for_each(|v| *v = center + DEVIATION * *v));
        Ok(out)
    }
}

/// This rank's piece of a tensor of standard normals that its name alone decides.
pub(super) fn global_normals(name: &str, ty: &Type, seat: &Seat) -> Vec<f32> {
    let hash =
        name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let key = DrawKey { seed: hash, chunk: 0, draw: 0 };
    let whole = ty.layout.global(&ty.shape, &seat.mesh);
    let ranges = ty.layout.ranges(&ty.shape, &seat.mesh, seat.coord());
    let mut out = vec![0.0; ty.elements() as usize];
    match (&ranges[..], &whole[..]) {
        // Only columns are cut: row by row.
        ([(row, _), (column, width)], [_, all]) if width != all => {
            let each = *width as usize;
            let rows: Vec<(usize, &mut [f32])> = out.chunks_mut(each.max(1)).enumerate().collect();
            in_parallel(rows, &|(r, part): (usize, &mut [f32])| {
                normals(key, (row + r as u64) * all + column, part);
            });
        }
        _ => {
            let inner: u64 = whole.iter().skip(1).product();
            fill_normals(key, ranges.first().map_or(0, |r| r.0 * inner), &mut out);
        }
    }
    out
}

/// Elements that one thread fills at a time.
const PIECE: usize = 1 << 20;

fn fill_normals(key: DrawKey, first: u64, out: &mut [f32]) {
    let pieces: Vec<(usize, &mut [f32])> = out.chunks_mut(PIECE).enumerate().collect();
    in_parallel(pieces, &|(i, part): (usize, &mut [f32])| normals(key, first + (i * PIECE) as u64, part));
}

fn in_parallel<T: Send>(mut work: Vec<T>, each: &(dyn Fn(T) + Sync)) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(work.len().max(1));
    let share = work.len().div_ceil(threads.max(1)).max(1);
    std::thread::scope(|s| {
        while !work.is_empty() {
            let part = work.split_off(work.len().saturating_sub(share));
            s.spawn(move || part.into_iter().for_each(each));
        }
    });
}
