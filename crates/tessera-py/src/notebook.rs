//! What notebooks show of meshes, arrays, plans and traces: small tables and charts without style sheets and scripts, in the
//! colours of the page around them.

use std::collections::BTreeMap;
use std::fmt::Write;

use pyo3::prelude::*;
use tessera_base::Bytes;

use crate::dtensor::DTensor;
use crate::mesh::Mesh;
use crate::plan::{Plan, list_collectives};
use crate::session_trace::SessionTrace;

/// Maximum number of rows of a table; a line below it counts the others.
const MAX_ROWS: usize = 16;

/// A table whose cells are texts.
struct Table<'a> {
    head: &'a [&'a str],
    rows: Vec<Vec<String>>,
}

impl Table<'_> {
    fn to_html(&self) -> String {
        let row = |cells: &mut dyn Iterator<Item = &str>, tag: &str| {
            let cells: String = cells.map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect();
            format!("<tr>{cells}</tr>")
        };
        let mut html = format!("<table>{}", row(&mut self.head.iter().copied(), "th"));
        for cells in self.rows.iter().take(MAX_ROWS) {
            html += &row(&mut cells.iter().map(String::as_str), "td");
        }
        html += "</table>";
        if let Some(more) = self.rows.len().checked_sub(MAX_ROWS).filter(|more| *more > 0) {
            let _ = write!(html, "<div>and {more} more</div>");
        }
        html
    }
}

/// Returns a text with the characters replaced that have a meaning in HTML.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c => out.push(c),
        }
    }
    out
}

/// Lists ranks, such as `0, 2, 4`, with an end to long lists.
fn list_ranks(ranks: &[u32]) -> String {
    let shown: Vec<String> = ranks.iter().take(MAX_ROWS).map(u32::to_string).collect();
    match ranks.len() - shown.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[pymethods]
impl Mesh {
    /// Each rank with its position and its device.
    fn _repr_html_(&self) -> String {
        let axes: Vec<_> = self.mesh.active_axes().collect();
        let names = axes.iter().map(|axis| axis.name());
        let head: Vec<&str> = ["rank"].into_iter().chain(names).chain(["device"]).collect();
        let rows = self.mesh.iter().zip(self.devices.iter()).map(|(rank, device)| {
            let coord = self.mesh.coord_of(rank);
            let position = axes.iter().map(|axis| coord.on_axis(*axis).to_string());
            [rank.to_string()].into_iter().chain(position).chain([device.clone()]).collect()
        });
        let table = Table { head: &head, rows: rows.collect() };
        format!("<div>Mesh {}</div>{}", escape(&self.mesh.to_string()), table.to_html())
    }
}

#[pymethods]
impl DTensor {
    /// Each shard with the ranks that hold it.
    fn _repr_html_(&self) -> PyResult<String> {
        let mut holders: BTreeMap<Vec<(u64, u64)>, Vec<u32>> = BTreeMap::new();
        for rank in self.mesh.mesh.iter() {
            holders.entry(self.ranges_of(rank.0)?).or_default().push(rank.0);
        }
        let names = self.dims.iter().map(|dim| dim.name());
        let head: Vec<&str> = ["ranks"].into_iter().chain(names).collect();
        let rows = holders.iter().map(|(ranges, ranks)| {
            let dims = ranges.iter().zip(self.values.shape()).map(|((start, len), extent)| match len {
                0 => "none".to_string(),
                _ if len == extent => format!("all {extent}"),
                1 => start.to_string(),
                _ => format!("{start} to {}", start + len - 1),
            });
            [list_ranks(ranks)].into_iter().chain(dims).collect()
        });
        let table = Table { head: &head, rows: rows.collect() };
        Ok(format!("<div>{}</div>{}", escape(&self.__repr__()), table.to_html()))
    }
}

#[pymethods]
impl Plan {
    /// The roles with their memory, and the collectives of the first rank of each.
    fn _repr_html_(&self) -> String {
        let sealed = &self.plan.sealed;
        let mut memory = Vec::new();
        let mut collectives = Vec::new();
        for role in sealed.roles() {
            let ranks: Vec<u32> = role.ranks.iter().map(|rank| rank.0).collect();
            let Some(first) = role.ranks.first() else { continue };
            let bytes = sealed.rank_memory(*first).unwrap_or_default();
            let [weights, inputs, temporaries] =
                [bytes.weights, bytes.inputs, bytes.temporaries].map(|bytes| bytes.to_string());
            memory.push(vec![role.role.clone(), list_ranks(&ranks), weights, inputs, temporaries]);
            for signature in self.signatures.iter() {
                let mut counts: BTreeMap<(String, String), (u64, u64)> = BTreeMap::new();
                for (op, axis, bytes) in
                    self.program_of(signature, first.0).into_iter().flat_map(list_collectives)
                {
                    let count = counts.entry((op, axis)).or_default();
                    *count = (count.0 + 1, count.1 + bytes);
                }
                let name = &signature.name;
                collectives.extend(counts.into_iter().map(|((op, axis), (count, bytes))| {
                    vec![
                        name.clone(),
                        role.role.clone(),
                        op,
                        axis,
                        count.to_string(),
                        Bytes(bytes).to_string(),
                    ]
                }));
            }
        }
        let memory = Table { head: &["role", "ranks", "weights", "inputs", "temporaries"], rows: memory };
        let mut html = format!("<div>{}</div>{}", escape(&self.__repr__()), memory.to_html());
        if collectives.is_empty() {
            html += "<div>no collectives</div>";
        } else {
            let head = &["program", "role", "collective", "axis", "count", "bytes of a rank"];
            html += &Table { head, rows: collectives }.to_html();
        }
        html
    }
}

#[pymethods]
impl SessionTrace {
    /// The chart of the newest call.
    fn _repr_html_(&self) -> String {
        self.trace.draw_newest_call().unwrap_or_else(|| format!("<div>{}</div>", escape(&self.__repr__())))
    }
}
