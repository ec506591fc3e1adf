//! Draws the newest call of a trace for a notebook.

use std::collections::BTreeMap;

use tessera_base::Nanoseconds;
use tessera_report::lane_chart::{BarWork, ChartBar, ChartLane, LaneChart, draw_lane_chart};

use super::array_trace::{ArrayTrace, ArrayTraceEvent, ArrayTraceKind};

impl ArrayTrace {
    /// Returns the chart of the newest call: a lane for each stream of each rank, as HTML with an inline SVG; `None` without
    /// a call.
    #[must_use]
    pub fn draw_newest_call(&self) -> Option<String> {
        let call = self.record.calls.last()?;
        let events = || self.events.iter().rev().take_while(|event| event.call == call.number);
        let mut lanes: BTreeMap<(u32, u32, &str), Vec<ChartBar>> = BTreeMap::new();
        for event in events() {
            let key = (event.rank, event.stream_id, &*event.stream);
            lanes.entry(key).or_default().push(to_bar(event, call.start_ns));
        }
        let lanes = lanes.into_iter().map(|((rank, id, stream), mut bars)| {
            bars.reverse();
            ChartLane { name: format!("rank {rank} · {stream} ({id})"), bars }
        });
        let length = Nanoseconds(call.end_ns.saturating_sub(call.start_ns));
        Some(draw_lane_chart(&LaneChart {
            caption: format!("call {} of the session, program {}: {length}", call.number, call.program),
            start_ns: call.start_ns,
            end_ns: call.end_ns,
            lanes: lanes.collect(),
        }))
    }
}

fn to_bar(event: &ArrayTraceEvent, origin_ns: u64) -> ChartBar {
    let work = match event.kind {
        ArrayTraceKind::Compute => BarWork::Compute,
        ArrayTraceKind::Issue => BarWork::Issue,
        ArrayTraceKind::InFlight => BarWork::InFlight,
        ArrayTraceKind::Wait => BarWork::Wait,
    };
    let from = Nanoseconds(event.start_ns.saturating_sub(origin_ns));
    let length = Nanoseconds(event.end_ns.saturating_sub(event.start_ns));
    ChartBar {
        title: format!("{}: {length} from {from} on", event.describe()),
        work,
        start_ns: event.start_ns,
        end_ns: event.end_ns,
    }
}
