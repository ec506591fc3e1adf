//! The plan on the page: mapping, memory, collectives, programs.

use crate::markup::{count, plural, text};
use std::fmt::Write;
use tessera_base::Bytes;

/// Most bytes shown of one program or mapping.
pub const MAX_TEXT_BYTES: usize = 512 << 10;

/// The sealed plan, as far as the page shows it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PlanView {
    /// The mapping's TOML.
    pub mapping: String,
    /// Programs by role.
    pub programs: Vec<ProgramView>,
    /// Memory by role.
    pub memory: Vec<MemoryRow>,
    /// Collectives by phase.
    pub collectives: Vec<CollectiveRow>,
}

/// A program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramView {
    /// Role and phase, such as `stage0 · denoise.fill3`.
    pub name: String,
    /// Its text.
    pub text: String,
}

/// What a rank of a role holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryRow {
    /// Role.
    pub role: String,
    /// Ranks that have it, such as `1–4`.
    pub ranks: String,
    /// What takes how many bytes, such as weights, caches, activations.
    pub items: Vec<(String, u64)>,
    /// Bytes that the device has.
    pub capacity: Option<u64>,
}

/// The collectives of one phase on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectiveRow {
    /// Phase.
    pub phase: String,
    /// Operation.
    pub op: String,
    /// Axis of the mesh.
    pub axis: String,
    /// How many.
    pub count: u64,
    /// Bytes that a rank sends in all of them.
    pub bytes: u64,
}

/// The section.
pub(super) fn plan(out: &mut String, p: &PlanView) {
    out.push_str("<section>\n<h2>Plan</h2>\n");
    if !p.mapping.is_empty() {
        let _ = write!(out, "<h3>Mapping</h3>\n<pre>{}</pre>\n", clipped(&p.mapping));
    }
    memory(out, &p.memory);
    if !p.collectives.is_empty() {
        out.push_str(
            "<h3>Collectives of one rank</h3>\n<div class=\"scroll\"><table>\n<thead><tr><th>phase</th>\
             <th class=\"l\">operation</th><th class=\"l\">axis</th><th>count</th><th>bytes sent</th></tr></thead>\n<tbody>\n",
        );
        for c in &p.collectives {
            let _ = writeln!(
                out,
                "<tr><td>{}</td><td class=\"l\">{}</td><td class=\"l\">{}</td><td>{}</td><td>{}</td></tr>",
                text(&c.phase),
                text(&c.op),
                text(&c.axis),
                count(c.count),
                Bytes(c.bytes)
            );
        }
        out.push_str("</tbody>\n</table></div>\n");
    }
    if !p.programs.is_empty() {
        out.push_str("<h3>Programs</h3>\n");
        for program in &p.programs {
            let lines = plural(program.text.lines().count() as u64, "line");
            let _ = writeln!(
                out,
                "<details><summary>{}<small>{lines}</small></summary><pre>{}</pre></details>",
                text(&program.name),
                clipped(&program.text)
            );
        }
    }
    out.push_str("</section>\n");
}

fn memory(out: &mut String, rows: &[MemoryRow]) {
    if rows.is_empty() {
        return;
    }
    let mut columns: Vec<&str> = Vec::new();
    for (name, _) in rows.iter().flat_map(|r| &r.items) {
        if !columns.contains(&name.as_str()) {
            columns.push(name);
        }
    }
    let heads: String = columns.iter().map(|c| format!("<th>{}</th>", text(c))).collect();
    let _ = write!(
        out,
        "<h3>Memory of one rank</h3>\n<div class=\"scroll\"><table>\n\
         <thead><tr><th>role</th><th class=\"l\">ranks</th>{heads}<th>sum</th><th>of device</th></tr></thead>\n<tbody>\n"
    );
    for r in rows {
        let _ = write!(out, "<tr><td>{}</td><td class=\"l\">{}</td>", text(&r.role), text(&r.ranks));
        for column in &columns {
            let mut bytes = r.items.iter().filter(|(name, _)| name == column).map(|(_, b)| *b).peekable();
            match bytes.peek() {
                Some(_) => {
                    let _ = write!(out, "<td>{}</td>", Bytes(bytes.fold(0, u64::saturating_add)));
                }
                None => out.push_str("<td>–</td>"),
            }
        }
        let sum = r.items.iter().fold(0u64, |a, (_, b)| a.saturating_add(*b));
        let share = r.capacity.filter(|c| *c > 0).map(|c| sum as f64 / c as f64 * 100.0);
        let of = share.map_or("–".to_string(), |share| {
            let class = if share > 100.0 { "b4" } else { "b1" };
            format!(
                "{share:.0} %<span class=\"meter\"><i class=\"{class}\" style=\"width:{:.1}%\"></i></span>",
                share.min(100.0)
            )
        });
        let _ = writeln!(out, "<td>{}</td><td>{of}</td></tr>", Bytes(sum));
    }
    out.push_str("</tbody>\n</table></div>\n");
}

/// A text, cut at a limit and saying so.
fn clipped(s: &str) -> String {
    if s.len() <= MAX_TEXT_BYTES {
        return text(s);
    }
    let end = s.floor_char_boundary(MAX_TEXT_BYTES);
    format!("{}\n… {} more bytes", text(&s[..end]), count((s.len() - end) as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_cut_between_characters() {
        assert_eq!(clipped("a<b"), "a&lt;b");
        assert!(
            clipped(&format!("x{}", "é".repeat(MAX_TEXT_BYTES))).ends_with("\n… 524\u{202f}290 more bytes")
        );
    }
}
