//! Draws a chart of lanes as one SVG without a style sheet, for notebooks: text and outlines have the colour of the text
//! around them, so it is legible on a dark and on a light ground.

use maud::{Markup, html};
use tessera_base::Nanoseconds;

/// Maximum number of lanes in a drawing.
pub const MAX_CHART_LANES: usize = 32;
/// Maximum number of bars in a lane of a drawing.
pub const MAX_CHART_LANE_BARS: usize = 400;

/// A chart of lanes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneChart {
    /// What the chart shows, in one line.
    pub caption: String,
    /// First nanosecond of the chart.
    pub start_ns: u64,
    /// One past its last nanosecond.
    pub end_ns: u64,
    /// Lanes from top to bottom.
    pub lanes: Vec<ChartLane>,
}

/// A lane of a chart, such as a stream of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChartLane {
    /// Text beside the lane.
    pub name: String,
    /// Bars; a later one is drawn over an earlier one.
    pub bars: Vec<ChartBar>,
}

/// A bar of a lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChartBar {
    /// Text that a pointer shows.
    pub title: String,
    /// What the time was spent on.
    pub work: BarWork,
    /// Start of the bar.
    pub start_ns: u64,
    /// End of the bar.
    pub end_ns: u64,
}

/// What the time of a bar was spent on, which gives the bar its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BarWork {
    /// An op that needs no other rank.
    Compute,
    /// The issue of a collective.
    Issue,
    /// Nothing: a collective was in flight.
    InFlight,
    /// A wait for other ranks.
    Wait,
}

impl BarWork {
    const ALL: [BarWork; 4] = [BarWork::Compute, BarWork::Issue, BarWork::InFlight, BarWork::Wait];

    fn name(self) -> &'static str {
        match self {
            BarWork::Compute => "compute",
            BarWork::Issue => "issue",
            BarWork::InFlight => "in flight",
            BarWork::Wait => "wait",
        }
    }

    /// Returns the fill and the outline: middle tones, which differ in lightness for readers who see no colours.
    fn colours(self) -> (&'static str, &'static str) {
        match self {
            BarWork::Compute => ("#4a86c5", "none"),
            BarWork::Issue => ("#d9832e", "none"),
            BarWork::InFlight => ("none", "currentColor"),
            BarWork::Wait => ("#9b9b9b", "none"),
        }
    }
}

const WIDTH: f64 = 720.0;
/// Width of the names of lanes.
const NAME_WIDTH: f64 = 170.0;
const LANE_PITCH: f64 = 20.0;
const BAR_HEIGHT: f64 = 13.0;
/// Height of the legend above the lanes, and of the axis below them.
const LEGEND_HEIGHT: f64 = 20.0;
const AXIS_HEIGHT: f64 = 18.0;

/// Draws a chart.
#[must_use]
pub fn draw_lane_chart(chart: &LaneChart) -> String {
    let lanes = &chart.lanes[..chart.lanes.len().min(MAX_CHART_LANES)];
    let bottom = LEGEND_HEIGHT + LANE_PITCH * lanes.len() as f64;
    let height = bottom + AXIS_HEIGHT;
    let view = format!("0 0 {WIDTH} {height}");
    let left_out = chart.lanes.len() - lanes.len()
        + lanes.iter().filter(|lane| lane.bars.len() > MAX_CHART_LANE_BARS).count();
    let markup = html! {
        div {
            div { (chart.caption) }
            svg viewBox=(view) width="100%" style=(format!("max-width:{WIDTH}px")) role="img" font-size="11"
                font-family="sans-serif" fill="currentColor" {
                (draw_legend())
                @for (i, lane) in lanes.iter().enumerate() {
                    (draw_lane(chart, lane, LEGEND_HEIGHT + LANE_PITCH * i as f64))
                }
                text x=(NAME_WIDTH) y=(bottom + 13.0) { "0" }
                text x=(WIDTH) y=(bottom + 13.0) text-anchor="end" {
                    (Nanoseconds(chart.end_ns.saturating_sub(chart.start_ns)).to_string())
                }
            }
            @if left_out > 0 { div { (left_out) " lanes are not shown or not whole; the saved trace has all" } }
        }
    };
    markup.into_string()
}

fn draw_legend() -> Markup {
    html! {
        @for (i, work) in BarWork::ALL.into_iter().enumerate() {
            @let x = NAME_WIDTH + 90.0 * i as f64;
            @let (fill, stroke) = work.colours();
            rect x=(x + 0.5) y="3.5" width="10" height="9" fill=(fill) stroke=(stroke) {}
            text x=(x + 15.0) y="12" { (work.name()) }
        }
    }
}

fn draw_lane(chart: &LaneChart, lane: &ChartLane, top: f64) -> Markup {
    let span = chart.end_ns.saturating_sub(chart.start_ns).max(1) as f64;
    let x_of = |ns: u64| {
        NAME_WIDTH + (WIDTH - NAME_WIDTH) * (ns.saturating_sub(chart.start_ns) as f64 / span).min(1.0)
    };
    html! {
        text x="0" y=(top + 11.0) { (lane.name) }
        line x1=(NAME_WIDTH) x2=(WIDTH) y1=(top + 16.5) y2=(top + 16.5) stroke="currentColor" stroke-opacity="0.2" {}
        @for bar in lane.bars.iter().take(MAX_CHART_LANE_BARS) {
            @let (fill, stroke) = bar.work.colours();
            @let (x, end) = (x_of(bar.start_ns), x_of(bar.end_ns));
            // A bar that is too short to see would hide that something ran.
            rect x=(round(x)) y=(top + 2.0) width=(round((end - x).max(0.7))) height=(BAR_HEIGHT) fill=(fill) stroke=(stroke)
                stroke-opacity="0.6" { title { (bar.title) } }
        }
    }
}

/// Rounds to hundredths of a pixel, which keeps the text short.
fn round(x: f64) -> f64 {
    (x * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(lanes: usize, bars: usize) -> LaneChart {
        let bar = |at: u64| ChartBar {
            title: "matmul <w>".into(),
            work: BarWork::Compute,
            start_ns: 100 + at,
            end_ns: 150 + at,
        };
        let lane = |i: usize| ChartLane {
            name: format!("rank {i} & co"),
            bars: (0..bars as u64).map(bar).collect(),
        };
        let lanes = (0..lanes).map(lane).collect();
        LaneChart { caption: "call 1 of <f>".into(), start_ns: 100, end_ns: 300, lanes }
    }

    #[test]
    fn texts_are_escaped_and_bars_are_placed_in_proportion() {
        let svg = draw_lane_chart(&chart(2, 1));
        for text in ["call 1 of &lt;f&gt;", "rank 1 &amp; co", "<title>matmul &lt;w&gt;</title>", "200 ns"] {
            assert!(svg.contains(text), "{text} is not in {svg}");
        }
        assert!(svg.contains(r#"<rect x="170" y="22" width="137.5""#), "{svg}");
        assert!(!svg.contains("not shown"));
    }

    #[test]
    fn a_large_chart_is_cut_and_says_so() {
        let svg = draw_lane_chart(&chart(MAX_CHART_LANES + 3, MAX_CHART_LANE_BARS + 1));
        let legend = BarWork::ALL.len();
        assert_eq!(svg.matches("<rect").count(), legend + MAX_CHART_LANES * MAX_CHART_LANE_BARS);
        assert!(svg.contains("35 lanes are not shown or not whole"), "{}", svg.len());
    }
}
