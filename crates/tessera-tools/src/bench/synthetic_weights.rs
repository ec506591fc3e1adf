//! Random weights for benchmarks. Their values depend only on the tensor name, so they are the same
//! on every mesh.

use std::collections::BTreeMap;

use tessera_base::Diagnostic;
use tessera_base::random::{DrawKey, fill_normals};
use tessera_device::{MeshRank, WeightSource, dtype};
use tessera_ir::Type;

/// Random weights: normals seeded by the tensor name, with the small magnitude of trained weights.
/// Norm weights are close to one.
#[derive(Debug, Clone, Default)]
pub struct SyntheticWeights {
    /// Row width of each scaled tensor by name. A tensor is read before its scales.
    row_widths: BTreeMap<String, u64>,
}

/// Standard deviation of every random weight, norm weights included.
const WEIGHT_STD: f32 = 0.02;

impl WeightSource for SyntheticWeights {
    fn read(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        mesh_rank: &MeshRank,
    ) -> Result<Vec<f32>, Diagnostic> {
        if matches!(load, Some("e4m3.scale" | "conv.e4m3.scale")) {
            // The scales cover whole rows, which are not sharded on this rank.
            let inner = self.row_widths.get(name).copied().unwrap_or(1);
            let rows =
                Type { dtype: tessera_ir::DType::F32, shape: vec![ty.shape[0], inner], layout: ty.layout };
            return self.read(name, &rows, None, mesh_rank).map(|w| dtype::row_scales(&w, inner as usize));
        }
        if matches!(load, Some("e4m3" | "conv.e4m3")) {
            self.row_widths.insert(name.to_string(), ty.shape[1]);
            let mut w = self.read(name, ty, None, mesh_rank)?;
            dtype::divide_by_row_scales(&mut w, ty.shape[1] as usize);
            return Ok(w);
        }
        let mut out = global_normals(name, ty, mesh_rank);
        let norm = name.contains("norm") && name.ends_with(".weight");
        let center = if norm { 1.0 } else { 0.0 };
        let parts: Vec<&mut [f32]> = out.chunks_mut(FILL_CHUNK).collect();
        for_each_parallel(parts, &|part: &mut [f32]| {
            part.iter_mut().for_each(|v| *v = center + WEIGHT_STD * *v)
        });
        Ok(out)
    }
}

/// Returns this rank's shard of a tensor of standard normals, seeded by the tensor name alone.
pub(super) fn global_normals(name: &str, ty: &Type, mesh_rank: &MeshRank) -> Vec<f32> {
    let hash =
        name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let key = DrawKey { seed: hash, chunk: 0, draw: 0 };
    let global_shape = ty.layout.global_shape(&ty.shape, &mesh_rank.mesh);
    let ranges = ty.layout.global_ranges(&ty.shape, &mesh_rank.mesh, mesh_rank.coord());
    let mut out = vec![0.0; ty.element_count() as usize];
    match (&ranges[..], &global_shape[..]) {
        // Only the columns are sharded, so each row has its own range of draws.
        ([(row, _), (column, width)], [_, row_width]) if width != row_width => {
            let each = *width as usize;
            let rows: Vec<(usize, &mut [f32])> = out.chunks_mut(each.max(1)).enumerate().collect();
            for_each_parallel(rows, &|(r, part): (usize, &mut [f32])| {
                fill_normals(key, (row + r as u64) * row_width + column, part);
            });
        }
        _ => {
            let inner: u64 = global_shape.iter().skip(1).product();
            fill_normals_parallel(key, ranges.first().map_or(0, |r| r.0 * inner), &mut out);
        }
    }
    out
}

/// Number of elements that one thread fills at a time.
const FILL_CHUNK: usize = 1 << 20;

fn fill_normals_parallel(key: DrawKey, first: u64, out: &mut [f32]) {
    let chunks: Vec<(usize, &mut [f32])> = out.chunks_mut(FILL_CHUNK).enumerate().collect();
    for_each_parallel(chunks, &|(i, part): (usize, &mut [f32])| {
        fill_normals(key, first + (i * FILL_CHUNK) as u64, part)
    });
}

fn for_each_parallel<T: Send>(mut work: Vec<T>, apply: &(dyn Fn(T) + Sync)) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(work.len().max(1));
    let share = work.len().div_ceil(threads.max(1)).max(1);
    std::thread::scope(|s| {
        while !work.is_empty() {
            let part = work.split_off(work.len().saturating_sub(share));
            s.spawn(move || part.into_iter().for_each(apply));
        }
    });
}
