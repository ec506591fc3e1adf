//! Texts of the report on a video model: the facts of a mapping and how two mappings differ.

use tessera_base::Bytes;
use tessera_cost::intervals::{Interval, IntervalKind};
use tessera_cost::program_cost::OpActivity;
use tessera_plan::video::{DecodePlacement, RankedMapping, VideoPins};

use super::VideoQuery;
use crate::format::{MIN_SHARE_SHOWN, format_ns};

pub(super) fn devices_label(query: &VideoQuery<'_>) -> String {
    let devices = query.devices.unwrap_or(query.machine.cluster.device_count());
    format!("{devices} devices of {}", query.machine.cluster.title)
}

pub(super) fn mapping_label(r: &RankedMapping) -> String {
    format!("{} {} {} {}", r.mapping.mesh, r.mapping.strategy_label(), r.mapping.topology.name(), r.decode)
}

/// Returns the bytes on the fullest rank, including the executor's own.
pub(super) fn rank_memory_bytes(query: &VideoQuery<'_>, r: &RankedMapping) -> f64 {
    r.memory.total_bytes().0 as f64 + query.machine.reserved_bytes()
}

pub(super) fn summary_line(query: &VideoQuery<'_>, r: &RankedMapping) -> String {
    format!(
        "{}: {:.1} frames/s, a chunk every {}, latency {}, {} devices, {:.1} GB",
        mapping_label(r),
        r.fps,
        format_ns(r.period.ns),
        format_ns(r.latency_ns),
        r.devices,
        rank_memory_bytes(query, r) / 1e9
    )
}

pub(super) fn pins_label(p: &VideoPins) -> String {
    let mut out = Vec::new();
    out.extend(p.tp.map(|n| format!("tp={n}")));
    out.extend(p.pp.map(|n| format!("pp={n}")));
    out.extend(p.strategy.map(|s| s.name().to_string()));
    out.extend(p.overlap_chunks.map(|n| format!("overlap_chunks={n}")));
    out.extend(p.topology.map(|t| t.name().to_string()));
    out.extend(p.decode.map(|d| d.name().to_string()));
    out.extend(p.media.map(|m| format!("media={}", m.name())));
    out.join(",")
}

pub(super) fn decode_label(d: DecodePlacement) -> String {
    let description = match d {
        DecodePlacement::OnMesh => "rank 0 of the mesh decodes while the mesh waits",
        DecodePlacement::AllRanks => "all ranks share the decoder, between two calls or at the end of each",
        DecodePlacement::Replicas => "each rank decodes whole pictures, at the end of each call",
        DecodePlacement::LeaderCpu => "the leader decodes on its CPU, beside the calls",
        DecodePlacement::Serial => "a dedicated rank decodes the whole chunk before the next begins",
        DecodePlacement::AnchorFirst => {
            "a dedicated rank decodes; the next chunk begins after the first latent"
        }
        DecodePlacement::AnchorShared => "a dedicated rank decodes; the mesh shares the first latent",
        DecodePlacement::Overlapped => "a dedicated rank decodes while the next chunk is generated",
    };
    format!("{d}: {description}")
}

pub(super) fn sent_label(r: &RankedMapping) -> String {
    let names = tessera_mesh::LinkClass::ALL.map(tessera_mesh::LinkClass::name);
    let list: Vec<String> = names
        .into_iter()
        .zip(r.call.sent_bytes)
        .filter(|(_, bytes)| *bytes > 0.0)
        .map(|(name, bytes)| format!("{} over {name} links", Bytes(bytes as u64)))
        .collect();
    if list.is_empty() { "nothing".to_string() } else { format!("{} by all ranks per call", list.join(", ")) }
}

/// Compares two mappings by the time of their busiest ranks, largest difference first.
pub(super) fn compare_parts(this: &RankedMapping, best: &RankedMapping) -> String {
    let (here, there) = (time_parts(this), time_parts(best));
    let mut terms: Vec<(String, f64, f64)> = here
        .into_iter()
        .map(|(name, ns)| {
            let other = there.iter().find(|(n, _)| *n == name).map_or(0.0, |(_, ns)| *ns);
            (name, ns, other)
        })
        .filter(|(_, a, b)| (a - b).abs() > best.call.ns * MIN_SHARE_SHOWN)
        .collect();
    if terms.is_empty() {
        return String::new();
    }
    terms.sort_by(|a, b| (b.1 - b.2).total_cmp(&(a.1 - a.2)));
    let mut out = String::from("what a call costs compared with the best\n");
    for (name, here, there) in terms {
        let sign = if here >= there { "+" } else { "-" };
        out += &format!(
            "  {name:<24} {sign}{} ({} here, {} there)\n",
            format_ns((here - there).abs()),
            format_ns(here),
            format_ns(there)
        );
    }
    out
}

/// Returns the device time of the busiest rank by kind of op, followed by the exposed collectives
/// and other waits.
pub(super) fn time_parts(best: &RankedMapping) -> Vec<(String, f64)> {
    let name = |d: &OpActivity| match d {
        OpActivity::Gemm => "matmuls",
        OpActivity::Attention => "attention",
        OpActivity::MemoryBound => "elementwise and norm kernels",
        OpActivity::Transfer => "packing for collectives",
        OpActivity::Wait => "unpacking",
        OpActivity::Nothing => "",
    };
    let mut out: Vec<(String, f64)> = Vec::new();
    for (doing, ns) in best.call.work_ns.iter().filter(|(d, _)| **d != OpActivity::Nothing) {
        out.push((name(doing).to_string(), *ns));
    }
    let busy: f64 = out.iter().map(|(_, ns)| ns).sum();
    let exposed = best.call.exposed_ns().min((best.call.ns - busy).max(0.0));
    out.push(("exposed collectives".to_string(), exposed));
    out.push(("other waits".to_string(), (best.call.ns - busy - exposed).max(0.0)));
    out
}

/// Prefixes the name of an interval with its class (`class.rest`), which selects its colour.
pub(super) fn with_class_prefix(b: &Interval) -> Interval {
    let (op, what) = b.name.split_once(' ').unwrap_or((&b.name, ""));
    let class = match (b.kind, op) {
        (IntervalKind::Collective, _) => op,
        (IntervalKind::Pack, _) => "pack",
        (_, "matmul") => "matmul",
        (_, "attention") => "attention",
        _ => "elementwise",
    };
    // The block number is redundant within a drawing of one block.
    let what = what.strip_prefix("blocks.").and_then(|w| w.split_once('.')).map_or(what, |(_, w)| w);
    let rest = if class == "elementwise" { format!("{op} {what}") } else { what.to_string() };
    let rest = rest.trim();
    Interval {
        name: if rest.is_empty() { class.to_string() } else { format!("{class}.{rest}") },
        ..b.clone()
    }
}
