//! The report's section that sets the estimate beside the run.

use maud::{Markup, html};
use tessera_base::{Bytes, Nanoseconds};

use super::layout::{render_note, render_section, render_table};
use crate::call_comparison::{CallComparison, EstimateComparison, relative_error};
use crate::markup::{format_count, format_or_dash, format_plural};

/// Renders a table for each kind of call that ran.
pub(super) fn render_comparison(comparison: &EstimateComparison) -> Markup {
    let calls: Vec<&CallComparison> = comparison.calls.iter().filter(|c| c.calls > 0).collect();
    if calls.is_empty() {
        return Markup::default();
    }
    let note = html! {
        "Estimate: " (comparison.machine) ". Times are per call, as means over ranks and medians over calls; the first call \
         of each kind is left out. Measured collectives include the wait for other ranks, estimated ones begin when the \
         last member has arrived. Single ops are timed on CPUs alone."
    };
    let body = html! {
        (render_note(note))
        @for call in calls {
            h3 { (call.name) ", " (format_plural(call.rows, "row")) ", " (format_plural(call.calls, "call")) }
            (render_call(call))
        }
    };
    render_section("Estimate beside the run", &body)
}

fn render_call(call: &CallComparison) -> Markup {
    let heads = html! {
        th { "class" } th { "ops" } th { "estimated" } th { "measured" } th { "error" } th { "bytes sent" }
    };
    let rows = html! {
        @for class in &call.classes {
            tr {
                td { (class.class) }
                td { (format_or_dash((class.ops > 0.0).then(|| format_count(class.ops.round() as u64)))) }
                (render_times(class.estimated_ns, class.measured_ns))
                td { (format_or_dash((class.sent_bytes > 0.0).then_some(Bytes(class.sent_bytes as u64)))) }
            }
        }
        tr.group {
            td { "in all" } td {}
            (render_times(call.estimated_ns, call.measured_ns))
            td {}
        }
    };
    render_table(&heads, &rows)
}

fn render_times(estimated_ns: Option<f64>, measured_ns: Option<f64>) -> Markup {
    let time = |ns: Option<f64>| format_or_dash(ns.map(|ns| Nanoseconds(ns.round() as u64)));
    let error = relative_error(estimated_ns, measured_ns).map(|e| format!("{:+.0} %", e * 100.0));
    html! { td { (time(estimated_ns)) } td { (time(measured_ns)) } td { (format_or_dash(error)) } }
}
