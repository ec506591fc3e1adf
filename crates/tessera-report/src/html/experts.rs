//! The report's section on the load of experts.

use maud::{Markup, html};

use super::layout::{render_note, render_section, render_table};
use crate::expert_load::{ExpertLoadRow, describe_expert_load};
use crate::markup::{format_count, format_percent};

/// Renders a row for each layer with experts; nothing for a run that counted none.
pub(super) fn render_expert_load(rows: &[ExpertLoadRow]) -> Markup {
    let Some(summary) = describe_expert_load(rows) else { return Markup::default() };
    let heads = html! {
        th { "layer" } th { "choices" } th { "moved" } th { "dropped" }
        th { "std/mean of experts" } th { "by chance" } th { "std/mean of ranks" } th { "by chance" }
        th { "busiest rank" } th { "gate" }
    };
    let body = html! {
        @for row in rows {
            tr {
                td { (row.layer) }
                td { (format_count(row.chosen)) }
                td { (format_count(row.moved)) }
                td { (format_count(row.dropped)) }
                td { (format_percent(row.expert_std_over_mean)) }
                td { (format_percent(row.expert_chance)) }
                td { (format_percent(row.rank_std_over_mean)) }
                td { (format_percent(row.rank_chance)) }
                td { (format_args!("{:.2} × mean", row.busiest_over_mean)) }
                td { (row.balance.name()) }
            }
        }
    };
    let note = html! {
        (summary) ". Experts are counted before capacities, ranks after them, over all steps; experts.jsonl has the counts of each step. \
         Chance is a router that chooses at random."
    };
    render_section("Expert load", &html! { (render_note(note)) (render_table(&heads, &body)) })
}
