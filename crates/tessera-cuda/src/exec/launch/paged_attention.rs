//! Attention over KV caches in pages: how its queries and positions are divided into blocks, and its launches.

use tessera_ir::{DType, Program, ValueId, views};

use super::elementwise::kernel_for_floats;
use super::language::rows_per_sequence;
use super::site::{LaunchSite, last_extent};
use crate::driver::{CudaResult, cuda_failure};
use crate::kernel_choice::{PagedRoute, choose_paged_attention};
use crate::kernel_params::Kernel;
use crate::kernel_table::{
    LATENT_ATTENTION_BF16, LATENT_ATTENTION_F32, MERGE_PARTS_BF16, MERGE_PARTS_F32, MergeParts,
    PAGED_ATTENTION_BF16, PAGED_ATTENTION_F32, PagedAttention, PagedShape,
};
use crate::kernels::{HeadBlocks, KernelLaunch};

/// Threads of a block, and positions of which the parts are multiples, as in paged_attention.cu and
/// latent_attention.cu. A step of the latter has 64 bytes of a column.
const PAGED_THREADS: u64 = 256;
const STEP: u64 = 64;
const LATENT_STEP_BYTES: u64 = 64;

/// The most queries of a block of the former, and the queries of a block of the latter.
const MAX_QUERIES: u64 = 8;
const FEW_LATENT_QUERIES: u64 = 4;
const LATENT_QUERIES: u64 = 16;

/// The most columns of values in latent_attention.cu, of which a thread adds two, and its largest head: a warp keeps
/// the keys of its positions in registers.
const MAX_LATENT_VALUES: u64 = 2 * PAGED_THREADS;
const MAX_LATENT_HEAD: u64 = 640;

/// Blocks that keep a large GPU busy, and the most parts that are worth adding. The number of parts depends on
/// shapes alone, so the bits are the same on every GPU.
const BUSY_BLOCKS: u64 = 1024;
const MAX_PARTS: u64 = 128;

/// The division of an attention into blocks.
struct Division {
    route: PagedRoute,
    /// Queries of a block.
    queries: u64,
    shape: PagedShape,
}

/// Builds attention over pages: the parts, and their sum if there are several.
pub(super) fn build_paged_attention(
    s: &LaunchSite<'_>,
    v: &views::PagedAttention,
    out: ValueId,
) -> CudaResult<Vec<KernelLaunch>> {
    let Division { route, queries, shape } = divide_attention(s.p, v);
    let (ty, sequences) = (s.p.type_of(v.q), s.p.type_of(v.start).element_count());
    let (kernel, shared_bytes) = find_kernel(v, ty.dtype, (route, queries))?;
    let sums = if shape.parts > 1 { s.scratch_address()? } else { 0 };
    let shape = PagedShape { first_head: find_first_head(s, v, shape.share), ..shape };
    let args = PagedAttention {
        q: s.at(v.q)?,
        k: s.at(v.k)?,
        v: s.at(v.v)?,
        pages: s.at(v.pages)?,
        start: s.at(v.start)?,
        out: s.at(out)?,
        sums: sums.into(),
        queries: queries as i32,
        shape,
    };
    let blocks = HeadBlocks {
        count: sequences * (shape.groups * shape.tiles * shape.parts) as u64,
        threads: PAGED_THREADS as u32,
        shared_bytes,
    };
    let mut launches = vec![KernelLaunch::for_heads(kernel, v.head_dim, blocks, args).begin_early()];
    if shape.parts > 1 {
        let merge = MergeParts { sums: sums.into(), start: s.at(v.start)?, out: s.at(out)?, shape };
        let kernel = kernel_for_floats(ty.dtype, MERGE_PARTS_F32, MERGE_PARTS_BF16)?;
        let blocks = HeadBlocks {
            count: ty.shape[0] * shape.heads as u64,
            threads: (shape.value_dim as u32).next_multiple_of(32).min(256),
            shared_bytes: 0,
        };
        launches.push(KernelLaunch::for_heads(kernel, 0, blocks, merge).begin_early());
    }
    Ok(launches)
}

/// Returns the kernel of an attention in blocks of some queries, and its bytes of dynamic shared memory.
fn find_kernel(
    v: &views::PagedAttention,
    dtype: DType,
    (route, queries): (PagedRoute, u64),
) -> CudaResult<(Kernel<PagedAttention>, u32)> {
    let value_dim = v.value_dim.unwrap_or(v.head_dim);
    match route {
        PagedRoute::KvHead => {
            let vectors = [16 / dtype.element_bytes(), 4, 2, 1];
            let vector = vectors.into_iter().find(|n| v.head_dim.is_multiple_of(*n)).unwrap_or(1);
            if v.head_dim / vector > PAGED_THREADS {
                return cuda_failure(format!("heads of {} elements", v.head_dim));
            }
            Ok((kernel_for_floats(dtype, PAGED_ATTENTION_F32, PAGED_ATTENTION_BF16)?, 0))
        }
        PagedRoute::Latent if v.head_dim > MAX_LATENT_HEAD || value_dim > MAX_LATENT_VALUES => {
            cuda_failure(format!("heads of {} elements with values of {value_dim}", v.head_dim))
        }
        PagedRoute::Latent => {
            let kernel = kernel_for_floats(dtype, LATENT_ATTENTION_F32, LATENT_ATTENTION_BF16)?;
            // The queries in f32, and the values of a step.
            Ok((kernel, (v.head_dim * (4 * queries + LATENT_STEP_BYTES)) as u32))
        }
    }
}

/// Divides an attention over pages. All but `first_head` is the same on every rank that has this program.
fn divide_attention(p: &Program, v: &views::PagedAttention) -> Division {
    let (k, pages) = (p.type_of(v.k), p.type_of(v.pages));
    let (heads, kv_heads) = (last_extent(p.type_of(v.q)) / v.head_dim, last_extent(k) / v.head_dim);
    let (all_kv_heads, share) = count_global_heads(p, v);
    // Heads of one group read the same KV head, wherever the rank's heads begin.
    let group = match all_kv_heads {
        1 => heads,
        _ if heads == kv_heads * share => share,
        _ => 1,
    };
    let (sequences, rows) = (p.type_of(v.start).element_count(), rows_per_sequence(p, v.q, v.start));
    let all_queries = rows * group;
    let route = choose_paged_attention(v.head_dim, v.k == v.v);
    let queries = match route {
        PagedRoute::KvHead => all_queries.next_power_of_two().min(MAX_QUERIES),
        PagedRoute::Latent if all_queries <= FEW_LATENT_QUERIES => FEW_LATENT_QUERIES,
        PagedRoute::Latent => LATENT_QUERIES,
    };
    let tiles = all_queries.div_ceil(queries);
    let positions = last_extent(pages) * v.page_rows;
    let groups = heads / group.max(1);
    let wanted = (BUSY_BLOCKS / (sequences * groups * tiles).max(1)).clamp(1, MAX_PARTS);
    let part_positions = positions.div_ceil(wanted).next_multiple_of(STEP).max(STEP);
    let shape = PagedShape {
        rows_per_sequence: rows as i32,
        heads: heads as i32,
        kv_heads: kv_heads as i32,
        page_count: last_extent(pages) as i32,
        page_rows: v.page_rows as i32,
        pool_pages: (k.shape[0] / v.page_rows) as i32,
        value_dim: v.value_dim.unwrap_or(v.head_dim) as i32,
        groups: groups as i32,
        share: share as i32,
        first_head: 0,
        window: v.window.map_or(i32::MAX, |w| i32::try_from(w).unwrap_or(i32::MAX)),
        sink: i32::try_from(v.sink).unwrap_or(i32::MAX),
        parts: positions.div_ceil(part_positions).max(1) as i32,
        part_positions: part_positions as i32,
        tiles: tiles as i32,
        scale: v.scale.map_or(1.0 / (v.head_dim as f32).sqrt(), |scale| scale as f32),
    };
    Division { route, queries, shape }
}

/// Returns the number of KV heads of all ranks, and how many query heads read each.
fn count_global_heads(p: &Program, v: &views::PagedAttention) -> (u64, u64) {
    let [q, k] = [v.q, v.k].map(|value| {
        let ty = p.type_of(value);
        ty.layout.global_shape(&ty.shape, &p.mesh).last().copied().unwrap_or(1)
    });
    (k / v.head_dim, (q / k.max(1)).max(1))
}

/// Returns the place of this rank's first query head among those that read its first KV head. It is not 0 on a rank
/// that has all KV heads and some of the query heads.
fn find_first_head(s: &LaunchSite<'_>, v: &views::PagedAttention, share: i32) -> i32 {
    let [q, k] = [v.q, v.k].map(|value| (s.first_global_column(value) / v.head_dim) as i32);
    q - k * share
}

/// Returns the bytes of scratch that an attention over pages needs: for each head and part the sums of values,
/// the largest score and the sum of weights.
pub(in crate::exec) fn paged_attention_scratch_bytes(p: &Program, v: &views::PagedAttention) -> usize {
    let Division { shape, .. } = divide_attention(p, v);
    let heads = p.type_of(v.q).element_count() / v.head_dim;
    if shape.parts > 1 { (heads * (shape.parts * (shape.value_dim + 2)) as u64 * 4) as usize } else { 0 }
}

#[cfg(test)]
mod tests {
    use tessera_ir::{OpView, parse_all};
    use tessera_mesh::Rank;

    use super::*;

    /// A program of one row per sequence, and the view of its attention. `of_q` and `of_k` are columns with layouts.
    fn attention(of_q: &str, of_k: &str, head: u64, v: &str) -> (Program, views::PagedAttention) {
        let text = format!(
            "program @p role(a) mesh(tp=3) {{ %q = input : f32[2, {of_q} %k = input : f32[96, {of_k} \
             %v = input : f32[96, {of_k} %pages = call \"pages\" : f32[2, 12] %start = call \"start\" : f32[2] \
             %o = ttile.paged_attention %q, %k, %{v}, pages=%pages, start=%start \
             {{head_dim = {head}, page_rows = 4}} }}"
        );
        let p = parse_all(&text, "test").unwrap_or_else(|e| panic!("{e:#?}")).remove(0);
        let views: Vec<OpView> = p.ops.iter().filter_map(|op| op.view().ok()).collect();
        let found = views.into_iter().find_map(|v| match v {
            OpView::PagedAttention(v) => Some(v),
            _ => None,
        });
        (p, found.expect("an attention"))
    }

    #[test]
    fn a_group_of_heads_reads_one_kv_head_wherever_the_heads_of_a_rank_begin() {
        let whole = "{tp: replicated}";
        let shard = "{tp: shard(1)}";
        // Query heads and KV heads of a rank, of which each group reads one: sharded alike, replicated KV heads, one KV
        // head, and everything on every rank.
        let cases = [
            (format!("48] {shard}"), format!("16] {shard}"), 2, 3, [0, 0, 0]),
            (format!("32] {shard}"), format!("16] {whole}"), 4, 6, [0, 4, 8]),
            (format!("32] {shard}"), format!("8] {whole}"), 1, 12, [0, 4, 8]),
            (format!("32] {whole}"), format!("16] {whole}"), 2, 2, [0, 0, 0]),
        ];
        for (of_q, of_k, groups, share, first_heads) in cases {
            let (p, v) = attention(&of_q, &of_k, 8, "v");
            let shape = divide_attention(&p, &v).shape;
            assert_eq!((shape.groups, shape.share), (groups, share), "{of_q}, {of_k}");
            let mut site = LaunchSite::without_memory(&p);
            let found = [0, 1, 2].map(|rank| {
                site.placement.rank = Rank(rank);
                find_first_head(&site, &v, shape.share)
            });
            assert_eq!(found, first_heads, "{of_q}, {of_k}");
        }
    }

    #[test]
    fn blocks_for_latents_have_queries_of_many_heads() {
        let (p, v) = attention("576] {tp: replicated}", "12] {tp: replicated}", 12, "k");
        let found = divide_attention(&p, &v);
        assert_eq!((found.route, found.queries, found.shape.tiles), (PagedRoute::Latent, 16, 3));
        let (p, v) = attention("36] {tp: replicated}", "12] {tp: replicated}", 12, "k");
        assert_eq!(divide_attention(&p, &v).queries, 4);
        let kernel = |dtype, queries| find_kernel(&v, dtype, (PagedRoute::Latent, queries)).map(|(_, n)| n);
        assert_eq!(kernel(DType::Bf16, 16).ok(), Some(12 * 128));
        let too_large = views::PagedAttention { head_dim: 648, value_dim: Some(512), ..v };
        assert!(find_kernel(&too_large, DType::F32, (PagedRoute::Latent, 16)).is_err());
    }
}
