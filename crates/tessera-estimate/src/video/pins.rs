//! Parses the pins of a video model.

use tessera_base::{Diagnostic, Diagnostics};
use tessera_plan::video::{DecodePlacement, VideoPins};
use tessera_plan::{MediaPlacement, Strategy, Topology};

/// Parses the pins of a video model.
///
/// # Errors
/// T1200 for a key that a video model does not have, or a value that the key does not allow.
pub fn parse_video_pins(text: &str) -> Result<VideoPins, Diagnostics> {
    let (mut out, mut ds) = (VideoPins::default(), Vec::new());
    for item in text.split([',', ' ']).map(str::trim).filter(|s| !s.is_empty()) {
        let (key, value) = item.split_once('=').unwrap_or((item, ""));
        let count = value.parse::<u32>().ok().filter(|n| *n > 0);
        let is_valid = match key {
            "tp" => set_pin(&mut out.tp, count),
            "pp" => set_pin(&mut out.pp, count),
            "ep" | "dp" => count == Some(1),
            "overlap_chunks" => set_pin(&mut out.overlap_chunks, count),
            "max_outstanding" => set_pin(&mut out.outstanding, count),
            "strategy" => set_pin(&mut out.strategy, Strategy::from_name(value)),
            "topology" => set_pin(&mut out.topology, Topology::from_name(value)),
            "decode" => set_pin(&mut out.decode, DecodePlacement::from_name(value)),
            "media" => set_pin(&mut out.media, MediaPlacement::from_name(value)),
            _ => false,
        };
        if !is_valid {
            ds.push(
                Diagnostic::error(&tessera_plan::search::T1200, format!("`{item}` cannot be pinned for a video model"))
                    .with_label(format!("pin {item}"), "invalid pin")
                    .with_hint("tp, pp and overlap_chunks are counts; strategy is ulysses or megatron; topology mesh, pp0 or pp1; decode on_mesh, all_ranks, replicas, leader_cpu, serial, anchor_first, anchor_shared or overlapped; media leader, mesh, replicas or outside; ep and dp are 1"),
            );
        }
    }
    if ds.is_empty() { Ok(out) } else { Err(ds) }
}

/// Sets a pin, and returns whether its value is valid.
fn set_pin<T>(pin: &mut Option<T>, value: Option<T>) -> bool {
    *pin = value;
    pin.is_some()
}
