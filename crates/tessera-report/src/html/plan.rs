//! The report's section on the sealed plan: mapping, memory, collectives and programs.

use std::borrow::Cow;

use maud::{Markup, html};
use tessera_base::Bytes;

use super::layout::{render_capacity_meter, render_collapsed_text, render_section, render_table};
use crate::markup::{format_count, format_or_dash, format_plural};

/// Maximum number of bytes shown of one program or mapping.
pub const MAX_TEXT_BYTES: usize = 512 << 10;

/// The parts of a sealed plan that the report shows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PlanView {
    /// Text of the mapping.toml from which the plan was made.
    pub mapping: String,
    /// Programs, one per role and phase.
    pub programs: Vec<ProgramView>,
    /// Memory use, one row per role.
    pub memory: Vec<RoleMemoryRow>,
    /// Collectives that one rank issues: a row for each phase, op and group.
    pub collectives: Vec<CollectiveTotalsRow>,
}

/// One program of the plan as text; every rank of its role runs it in its phase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramView {
    /// Role and phase, such as `stage0 · denoise.fill3`.
    pub name: String,
    /// Text form of the program, of which the report shows at most [`MAX_TEXT_BYTES`].
    pub text: String,
}

/// Memory use of one rank of a role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleMemoryRow {
    /// Name of the role, such as `stage0`; in the report of an estimate, of the memory tier.
    pub role: String,
    /// Ranks with the role, such as `1, 2`; in the report of an estimate, words such as
    /// `the fullest`.
    pub ranks: String,
    /// Bytes by use, such as weights, caches and activations.
    pub bytes_by_use: Vec<(String, u64)>,
    /// Memory capacity of the device in bytes.
    pub capacity: Option<u64>,
}

/// Collectives of one operation over one axis that a rank issues in a phase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectiveTotalsRow {
    /// Name of the phase with its variant, such as `denoise.fill3`.
    pub phase: String,
    /// Name of the op, such as `all_reduce`.
    pub op: String,
    /// Group of the collectives: an axis, a subgroup such as `tp/2`, or `world`.
    pub axis: String,
    /// Number of such collectives that one rank issues in the phase.
    pub count: u64,
    /// Bytes that a rank sends in all of these collectives together.
    pub bytes: u64,
}

impl RoleMemoryRow {
    /// Returns the bytes of one use; `None` if the row does not list it.
    pub(super) fn bytes_of(&self, name: &str) -> Option<Bytes> {
        let parts = self.bytes_by_use.iter().filter(|(n, _)| n == name);
        parts.map(|(_, b)| Bytes(*b)).reduce(|a, b| Bytes(a.0.saturating_add(b.0)))
    }

    /// Returns the bytes of all uses.
    pub(super) fn sum(&self) -> Bytes {
        Bytes(self.bytes_by_use.iter().fold(0, |a, (_, b)| a.saturating_add(*b)))
    }

    /// Returns the sum in percent of the capacity; `None` if the capacity is unknown or zero.
    pub(super) fn percent_of_capacity(&self) -> Option<f64> {
        self.capacity.filter(|c| *c > 0).map(|c| self.sum().0 as f64 / c as f64 * 100.0)
    }
}

/// Returns the names of all uses in order of appearance.
pub(super) fn list_uses(rows: &[RoleMemoryRow]) -> Vec<&str> {
    let mut uses: Vec<&str> = Vec::new();
    for (name, _) in rows.iter().flat_map(|r| &r.bytes_by_use) {
        if !uses.contains(&name.as_str()) {
            uses.push(name);
        }
    }
    uses
}

/// Renders the mapping, the memory, the collectives and the programs; empty parts are left out.
pub(super) fn render_plan_section(p: &PlanView) -> Markup {
    let body = html! {
        @if !p.mapping.is_empty() { h3 { "Mapping" } pre { (truncate_text(&p.mapping)) } }
        @if !p.memory.is_empty() { h3 { "Memory of one rank" } (render_memory_table(&p.memory)) }
        @if !p.collectives.is_empty() {
            h3 { "Collectives of one rank" }
            (render_collectives(&p.collectives))
        }
        @if !p.programs.is_empty() {
            h3 { "Programs" }
            @for program in &p.programs {
                @let lines = format_plural(program.text.lines().count() as u64, "line");
                @let summary = html! { (program.name) small { (lines) } };
                (render_collapsed_text(summary, &truncate_text(&program.text)))
            }
        }
    };
    render_section("Plan", &body)
}

fn render_collectives(collectives: &[CollectiveTotalsRow]) -> Markup {
    let heads = html! {
        th { "phase" } th.l { "operation" } th.l { "axis" } th { "count" } th { "bytes sent" }
    };
    let rows = html! {
        @for c in collectives {
            tr {
                td { (c.phase) } td.l { (c.op) } td.l { (c.axis) } td { (format_count(c.count)) }
                td { (Bytes(c.bytes)) }
            }
        }
    };
    render_table(&heads, &rows)
}

fn render_memory_table(roles: &[RoleMemoryRow]) -> Markup {
    let uses = list_uses(roles);
    let heads = html! {
        th { "role" } th.l { "ranks" }
        @for name in &uses { th { (name) } }
        th { "sum" } th { "of device" }
    };
    let rows = html! {
        @for r in roles {
            tr {
                td { (r.role) } td.l { (r.ranks) }
                @for name in &uses { td { (format_or_dash(r.bytes_of(name))) } }
                td { (r.sum()) }
                td {
                    @match r.percent_of_capacity() {
                        Some(percent) => { (format_args!("{percent:.0} %")) (render_capacity_meter(percent)) }
                        None => "–"
                    }
                }
            }
        }
    };
    render_table(&heads, &rows)
}

/// Cuts a text at [`MAX_TEXT_BYTES`] and notes how many bytes are missing.
fn truncate_text(s: &str) -> Cow<'_, str> {
    if s.len() <= MAX_TEXT_BYTES {
        return s.into();
    }
    let end = s.floor_char_boundary(MAX_TEXT_BYTES);
    format!("{}\n… {} more bytes", &s[..end], format_count((s.len() - end) as u64)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_cut_between_characters() {
        assert_eq!(truncate_text("a<b"), "a<b");
        assert!(
            truncate_text(&format!("x{}", "é".repeat(MAX_TEXT_BYTES)))
                .ends_with("\n… 524\u{202f}290 more bytes")
        );
    }
}
