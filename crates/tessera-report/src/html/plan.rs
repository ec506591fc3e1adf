//! The report's section on the sealed plan: mapping, memory, collectives and programs.

use crate::markup::{escape_text, format_count, format_plural};
use std::fmt::Write;
use tessera_base::Bytes;

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
    /// Collectives, grouped by phase.
    pub collectives: Vec<CollectiveTotalsRow>,
}

/// One program of the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramView {
    /// Role and phase, such as `stage0 · denoise.fill3`.
    pub name: String,
    /// Text form of the program.
    pub text: String,
}

/// Memory use of one rank of a role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleMemoryRow {
    /// Name of the role.
    pub role: String,
    /// Ranks with the role, such as `1–4`.
    pub ranks: String,
    /// Bytes by use, such as weights, caches and activations.
    pub bytes_by_use: Vec<(String, u64)>,
    /// Memory capacity of the device in bytes.
    pub capacity: Option<u64>,
}

/// Collectives of one operation over one axis that a rank issues in a phase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectiveTotalsRow {
    /// Name of the phase.
    pub phase: String,
    /// Name of the operation.
    pub op: String,
    /// Mesh axis of the group.
    pub axis: String,
    /// Number of such collectives that one rank issues in the phase.
    pub count: u64,
    /// Bytes that a rank sends in all of these collectives together.
    pub bytes: u64,
}

/// Writes the section on the plan.
pub(super) fn write_plan_section(out: &mut String, p: &PlanView) {
    out.push_str("<section>\n<h2>Plan</h2>\n");
    if !p.mapping.is_empty() {
        let _ = write!(out, "<h3>Mapping</h3>\n<pre>{}</pre>\n", truncate_text(&p.mapping));
    }
    write_memory_table(out, &p.memory);
    if !p.collectives.is_empty() {
        out.push_str(
            "<h3>Collectives of one rank</h3>\n<div class=\"scroll\"><table>\n<thead><tr><th>phase</th>\
             <th class=\"l\">operation</th><th class=\"l\">axis</th><th>count</th><th>bytes sent</th></tr></thead>\n<tbody>\n",
        );
        for c in &p.collectives {
            let _ = writeln!(
                out,
                "<tr><td>{}</td><td class=\"l\">{}</td><td class=\"l\">{}</td><td>{}</td><td>{}</td></tr>",
                escape_text(&c.phase),
                escape_text(&c.op),
                escape_text(&c.axis),
                format_count(c.count),
                Bytes(c.bytes)
            );
        }
        out.push_str("</tbody>\n</table></div>\n");
    }
    if !p.programs.is_empty() {
        out.push_str("<h3>Programs</h3>\n");
        for program in &p.programs {
            let lines = format_plural(program.text.lines().count() as u64, "line");
            let _ = writeln!(
                out,
                "<details><summary>{}<small>{lines}</small></summary><pre>{}</pre></details>",
                escape_text(&program.name),
                truncate_text(&program.text)
            );
        }
    }
    out.push_str("</section>\n");
}

fn write_memory_table(out: &mut String, rows: &[RoleMemoryRow]) {
    if rows.is_empty() {
        return;
    }
    let mut columns: Vec<&str> = Vec::new();
    for (name, _) in rows.iter().flat_map(|r| &r.bytes_by_use) {
        if !columns.contains(&name.as_str()) {
            columns.push(name);
        }
    }
    let heads: String = columns.iter().map(|c| format!("<th>{}</th>", escape_text(c))).collect();
    let _ = write!(
        out,
        "<h3>Memory of one rank</h3>\n<div class=\"scroll\"><table>\n\
         <thead><tr><th>role</th><th class=\"l\">ranks</th>{heads}<th>sum</th><th>of device</th></tr></thead>\n<tbody>\n"
    );
    for r in rows {
        let _ = write!(
            out,
            "<tr><td>{}</td><td class=\"l\">{}</td>",
            escape_text(&r.role),
            escape_text(&r.ranks)
        );
        for column in &columns {
            let mut bytes =
                r.bytes_by_use.iter().filter(|(name, _)| name == column).map(|(_, b)| *b).peekable();
            match bytes.peek() {
                Some(_) => {
                    let _ = write!(out, "<td>{}</td>", Bytes(bytes.fold(0, u64::saturating_add)));
                }
                None => out.push_str("<td>–</td>"),
            }
        }
        let sum = r.bytes_by_use.iter().fold(0u64, |a, (_, b)| a.saturating_add(*b));
        let share = r.capacity.filter(|c| *c > 0).map(|c| sum as f64 / c as f64 * 100.0);
        let share_of_device = share.map_or("–".to_string(), |share| {
            let class = if share > 100.0 { "b4" } else { "b1" };
            format!(
                "{share:.0} %<span class=\"meter\"><i class=\"{class}\" style=\"width:{:.1}%\"></i></span>",
                share.min(100.0)
            )
        });
        let _ = writeln!(out, "<td>{}</td><td>{share_of_device}</td></tr>", Bytes(sum));
    }
    out.push_str("</tbody>\n</table></div>\n");
}

/// Escapes a text for HTML; cuts it at [`MAX_TEXT_BYTES`] and notes how many bytes are missing.
fn truncate_text(s: &str) -> String {
    if s.len() <= MAX_TEXT_BYTES {
        return escape_text(s);
    }
    let end = s.floor_char_boundary(MAX_TEXT_BYTES);
    format!("{}\n… {} more bytes", escape_text(&s[..end]), format_count((s.len() - end) as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_cut_between_characters() {
        assert_eq!(truncate_text("a<b"), "a&lt;b");
        assert!(
            truncate_text(&format!("x{}", "é".repeat(MAX_TEXT_BYTES)))
                .ends_with("\n… 524\u{202f}290 more bytes")
        );
    }
}
