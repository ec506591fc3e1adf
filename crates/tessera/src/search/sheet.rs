//! What planning by estimate comes to, in one shape for every kind of model: text for a terminal, a page, JSON.

use std::collections::BTreeSet;
use std::fmt::Write;

use serde_json::json;
use tessera_cost::bars::{Bar, Kind};
use tessera_report::html::{EstimatePage, GateVerdict, Standing, estimate};
use tessera_report::timeline::{RankName, Span, Timeline};

/// A plan by estimate.
#[derive(Debug, Clone)]
pub struct Sheet {
    /// What the page shows.
    pub page: EstimatePage,
    /// The numbers for programs.
    pub json: serde_json::Value,
    /// Everything that ran when, for a trace; empty where nothing fits.
    pub timeline: Timeline,
    /// Hints to the libraries below the ranks.
    pub env: String,
    /// Which rank sits on which device, where a mapping fits.
    pub ranks: Option<String>,
    /// The program of one layer's attention, where the mapping's scheme has one.
    pub module: Option<String>,
}

/// Mappings and reasons that a terminal shows; the page has more.
const SHOWN: usize = 8;

impl Sheet {
    /// Whether a mapping fits.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.page.standing != Standing::Refused
    }

    /// Puts into the numbers what the page says beyond them: its verdict, what threatens and what helps, and the tables worth
    /// knowing. A table has an id that stays when its title is worded otherwise; cells are as on the page, with units.
    pub(super) fn tell(&mut self) {
        let p = &self.page;
        let standing = match p.standing {
            Standing::Good => "good",
            Standing::Warns => "warns",
            Standing::Refused => "refused",
        };
        let action = |(what, then): &(String, String)| json!({"what": what, "says": then});
        self.json["standing"] = standing.into();
        self.json["says"] = p.says.clone().into();
        self.json["warnings"] = p.warnings.clone().into();
        self.json["remedies"] = p
            .remedies
            .iter()
            .map(|r| {
                let actions: Vec<_> = r.actions.iter().map(action).collect();
                json!({"mode": r.mode, "sign": r.sign, "actions": actions})
            })
            .collect();
        self.json["advice"] = p
            .advice
            .iter()
            .map(|a| json!({"id": a.id, "title": a.title, "note": a.note, "columns": a.columns, "rows": a.rows}))
            .collect();
    }

    /// For a browser.
    #[must_use]
    pub fn html(&self) -> String {
        estimate(&self.page)
    }

    /// For a terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let p = &self.page;
        let mut out = format!("{}\n{}\n", p.title, p.says);
        for w in &p.warnings {
            let _ = writeln!(out, "warning: {w}");
        }
        if !p.numbers.is_empty() {
            let numbers: Vec<String> =
                p.numbers.iter().map(|n| format!("{} {}, {}", n.value, n.unit, n.label)).collect();
            block(&mut out, "", numbers.into_iter().map(|n| vec![n]).collect(), &[]);
        }
        block(&mut out, "mapping", p.facts.iter().map(|(k, v)| vec![k.clone(), v.clone()]).collect(), &[]);
        let whole: f64 = p.parts.iter().map(|(_, ns)| ns).sum();
        let parts = p.parts.iter().filter(|(_, ns)| *ns > 0.0).map(|(name, ns)| {
            let ms = ns / 1e6;
            vec![name.clone(), format!("{ms:.3} ms"), format!("{:.1} %", ns / whole * 100.0)]
        });
        block(&mut out, "where the time goes", parts.collect(), &[1, 2]);
        let memory = p.memory.iter().map(|m| {
            let items: Vec<String> = m
                .items
                .iter()
                .map(|(name, bytes)| format!("{name} {}", tessera_base::Bytes(*bytes)))
                .collect();
            let all: u64 = m.items.iter().map(|(_, b)| b).sum();
            let of = m.capacity.map_or(String::new(), |c| format!(" of {}", tessera_base::Bytes(c)));
            vec![m.role.clone(), format!("{}{of}", tessera_base::Bytes(all)), items.join(", ")]
        });
        block(&mut out, "memory of the fullest rank", memory.collect(), &[1]);
        let gates = p.gates.iter().map(|g| {
            let word = match g.verdict {
                GateVerdict::Pass => "pass",
                GateVerdict::Warn => "warn",
                GateVerdict::Fail => "FAIL",
                GateVerdict::Void => "n/a",
            };
            vec![word.to_string(), g.title.clone(), g.value.clone(), g.limit.clone()]
        });
        block(&mut out, "gates (tessera plan --out DIR has the arithmetic)", gates.collect(), &[2, 3]);
        for r in &p.remedies {
            let actions = r.actions.iter().map(|(what, then)| vec![what.clone(), then.clone()]);
            block(&mut out, &format!("{}: {}", r.mode, r.sign), actions.collect(), &[]);
        }
        for a in &p.advice {
            let mut rows = vec![a.columns.clone()];
            rows.extend(a.rows.iter().cloned());
            block(&mut out, &format!("worth knowing: {}\n  {}", a.title, a.note), rows, &a.numbers());
        }
        if p.mappings.len() > 1 {
            let mut rows = vec![p.columns.clone()];
            rows.extend(p.mappings.iter().take(SHOWN).cloned());
            block(&mut out, "mappings worth weighing", rows, &(1..p.columns.len()).collect::<Vec<_>>());
        }
        let all: u64 = p.refused.iter().map(|(_, n, _)| n).sum();
        let refused = p.refused.iter().map(|(why, n, one)| vec![n.to_string(), why.clone(), one.clone()]);
        block(&mut out, &format!("refused: {all} of {}", p.considered), refused.collect(), &[0]);
        if !p.sources.is_empty() {
            out.push('\n');
            for s in &p.sources {
                let _ = writeln!(out, "{s}");
            }
        }
        out
    }
}

/// Bars as a timeline; `lane` says which stream a bar stands on.
pub(crate) fn timeline_of(bars: &[Bar], lane: impl Fn(&Bar) -> String) -> Timeline {
    let at = |ns: f64| ns.max(0.0).round() as u64;
    let spans = bars.iter().map(|b| Span {
        rank: b.rank,
        stream: lane(b),
        name: b.name.clone(),
        chunk: 0,
        start_ns: at(b.start_ns),
        end_ns: at(b.end_ns).max(at(b.start_ns)),
        collectives: u32::from(b.kind == Kind::Collective),
        waits: None,
    });
    let ranks: BTreeSet<u32> = bars.iter().map(|b| b.rank).collect();
    let mut t = Timeline {
        spans: spans.collect(),
        ranks: ranks.into_iter().map(|rank| RankName { rank, name: format!("rank {rank}") }).collect(),
        ..Timeline::default()
    };
    t.sort();
    t
}

/// A titled table; columns of these numbers stand to the right.
fn block(out: &mut String, title: &str, rows: Vec<Vec<String>>, right: &[usize]) {
    if rows.is_empty() {
        return;
    }
    if title.is_empty() {
        out.push('\n');
    } else {
        let _ = write!(out, "\n{title}\n");
    }
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let wide: Vec<usize> = (0..columns)
        .map(|c| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0))
        .collect();
    for row in &rows {
        let mut line = String::from(" ");
        for (c, cell) in row.iter().enumerate() {
            let pad = " ".repeat(wide[c].saturating_sub(cell.chars().count()));
            if right.contains(&c) {
                let _ = write!(line, " {pad}{cell} ");
            } else {
                let _ = write!(line, " {cell}{pad} ");
            }
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
}
