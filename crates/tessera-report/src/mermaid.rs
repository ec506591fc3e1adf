//! The timeline as a Mermaid gantt, for a page that renders Markdown.

use crate::timeline::{Timeline, Window};
use std::fmt::Write;

/// Most bars of a chart: Mermaid lays out slowly beyond a few hundred.
pub const MAX_BARS: usize = 200;

/// A gantt of the spans that begin inside a window. One millisecond on its axis is one microsecond of the
/// run, since Mermaid knows nothing finer; the title says so.
#[must_use]
pub fn gantt(timeline: &Timeline, window: Window) -> String {
    let mut out = String::from("gantt\n");
    let mut bars = 0;
    let mut left_out = 0;
    let mut body = String::new();
    for lane in timeline.lanes() {
        let mut titled = false;
        for s in lane.iter().filter(|s| (window.start_ns..window.end_ns).contains(&s.start_ns)) {
            if bars == MAX_BARS {
                left_out += 1;
                continue;
            }
            if !titled {
                let name = timeline.ranks.iter().find(|r| r.rank == s.rank).map_or("", |r| r.name.as_str());
                let _ = writeln!(body, "    section {} {}", plain(name), plain(&s.stream));
                titled = true;
            }
            let from = (s.start_ns - window.start_ns) / 1000;
            let to = (s.end_ns.saturating_sub(window.start_ns)).div_ceil(1000).max(from + 1);
            let _ = writeln!(body, "    {} {} :{from}, {to}", plain(&s.name), s.chunk);
            bars += 1;
        }
    }
    let cut = if left_out > 0 { format!(", {left_out} bars left out") } else { String::new() };
    let _ = writeln!(out, "    title microseconds since {}{cut}", tessera_base::Nanoseconds(window.start_ns));
    out.push_str("    dateFormat x\n    axisFormat %Q\n");
    out + &body
}

/// Text that cannot end a Mermaid statement.
fn plain(s: &str) -> String {
    s.chars().map(|c| if c.is_control() || ":;#,%{}".contains(c) { ' ' } else { c }).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::timeline::tests::sample;

    #[test]
    fn draws_a_window() {
        let t = Timeline::from_record(&sample(3));
        assert_eq!(
            gantt(&t, t.steady(1).unwrap()),
            "gantt\n    title microseconds since 11.0 ms\n    dateFormat x\n    axisFormat %Q\n    \
             section rank 0 · lead decode\n    decode 1 :9000, 10000\n    \
             section rank 1 · stage0 compute\n    denoise.0 1 :0, 4000\n    denoise.1 1 :4000, 8000\n    \
             clean 1 :8000, 9001\n"
        );
    }

    #[test]
    fn is_bounded() {
        let t = Timeline::from_record(&sample(100));
        let text = gantt(&t, Window { start_ns: 0, end_ns: u64::MAX });
        assert_eq!(text.matches(" :").count(), MAX_BARS);
        assert!(text.contains("200 bars left out"));
        assert_eq!(plain("a:b;c%"), "a b c ");
    }
}
