//! The comment lines at the top of a file.

use std::collections::BTreeMap;

use tessera_base::random::{DrawKey, normals};
use tessera_ir::{Program, RoleRanks};
use tessera_mesh::{Mesh, Rank};
use tessera_reference::{Arg, Call, Feed, Tensor};

/// What a file tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It can be read, or cannot for the reasons marked.
    Parse,
    /// It is a fragment, and its review is as marked.
    Fragment,
    /// Its canonical text.
    Print,
    /// What the judge says.
    Check,
    /// What it computes.
    Eval,
}

/// A file's header.
#[derive(Debug)]
pub(crate) struct Header {
    pub kind: Kind,
    /// Which ranks play a role, where it is not clear from the roles' names.
    pub ranks: BTreeMap<String, Vec<Rank>>,
    pub call: Call,
    pub weights: BTreeMap<String, Tensor>,
    /// Words of the fault that an evaluation must end with.
    pub fault: Option<String>,
    /// Largest difference between numbers that count as equal.
    pub tolerance: f64,
    /// Names of the collectives that every program of a role issues, in order.
    pub collectives: Option<Vec<String>>,
    /// Values that are put into one memory slot, the first one's.
    pub share: Vec<Vec<String>>,
    /// Values that get no memory slot.
    pub homeless: Vec<String>,
    /// Bytes of a device.
    pub device_bytes: Option<u64>,
    /// Whether communicators serve one graph at a time.
    pub graph_mixing_off: bool,
    /// Calls that may be made: lists of phases.
    pub calls: Vec<(String, Vec<String>)>,
}

impl Header {
    pub(crate) fn read(text: &str) -> Result<Header, Vec<String>> {
        let mut h = Header {
            kind: Kind::Parse,
            ranks: BTreeMap::new(),
            call: Call::default(),
            weights: BTreeMap::new(),
            fault: None,
            tolerance: 1e-9,
            collectives: None,
            share: Vec::new(),
            homeless: Vec::new(),
            device_bytes: None,
            graph_mixing_off: false,
            calls: Vec::new(),
        };
        let mut wrong = Vec::new();
        let mut first = true;
        let mut local: BTreeMap<String, Vec<Tensor>> = BTreeMap::new();
        for (i, line) in text.lines().enumerate() {
            let Some(line) = line.strip_prefix("//") else { break };
            let Some((key, value)) = line.split_once(':') else { continue };
            if let Err(why) = h.line(key.trim(), value.trim(), first, &mut local) {
                wrong.push(format!("line {}: {why}", i + 1));
            }
            first = false;
        }
        if first {
            wrong.push("a file begins with `// test: parse`, fragment, print, check or eval".to_string());
        }
        h.call.inputs.extend(local.into_iter().map(|(k, v)| (k, Feed::PerRank(v))));
        if wrong.is_empty() { Ok(h) } else { Err(wrong) }
    }

    fn line(
        &mut self,
        key: &str,
        value: &str,
        first: bool,
        local: &mut BTreeMap<String, Vec<Tensor>>,
    ) -> Result<(), String> {
        let (key, name) = key.split_once(' ').map_or((key, ""), |(k, n)| (k, n.trim()));
        if first != (key == "test") {
            return Err("`test` is the first key, and only the first".to_string());
        }
        match key {
            "test" => {
                self.kind = match value {
                    "parse" => Kind::Parse,
                    "fragment" => Kind::Fragment,
                    "print" => Kind::Print,
                    "check" => Kind::Check,
                    "eval" => Kind::Eval,
                    other => return Err(format!("test `{other}`")),
                }
            }
            "ranks" => {
                let ranks: Result<Vec<Rank>, _> =
                    value.split_whitespace().map(|r| r.parse().map(Rank)).collect();
                self.ranks.insert(name.to_string(), ranks.map_err(|_| format!("ranks `{value}`"))?);
            }
            "int" => {
                let i = value.parse().map_err(|_| format!("`{value}` is no whole number"))?;
                self.call.scalars.insert(name.to_string(), Arg::Int(i));
            }
            "float" => {
                self.call.scalars.insert(name.to_string(), Arg::Float(tensor(value)?));
            }
            "input" => {
                self.call.inputs.insert(name.to_string(), Feed::Whole(tensor(value)?));
            }
            // One line per rank, in rank order.
            "piece" => local.entry(name.to_string()).or_default().push(tensor(value)?),
            "weight" => {
                self.weights.insert(name.to_string(), tensor(value)?);
            }
            "fault" => self.fault = Some(value.to_string()),
            "tolerance" => self.tolerance = value.parse().map_err(|_| format!("tolerance `{value}`"))?,
            "collectives" => self.collectives = Some(words(value)),
            "share" => self.share.push(words(value)),
            "homeless" => self.homeless.extend(words(value)),
            "device-bytes" => {
                self.device_bytes = Some(value.parse().map_err(|_| format!("bytes `{value}`"))?);
            }
            "graph-mixing" => {
                self.graph_mixing_off = match value {
                    "off" => true,
                    "on" => false,
                    other => return Err(format!("graph-mixing `{other}`: write on or off")),
                }
            }
            "phases" => self.calls.push((name.to_string(), words(value))),
            "note" | "error-anywhere" => {}
            other => return Err(format!("unknown key `{other}`")),
        }
        Ok(())
    }

    /// The program of each rank, for programs of one phase.
    pub(crate) fn cast<'a>(&self, mesh: &Mesh, phase: &[&'a Program]) -> Result<Vec<&'a Program>, String> {
        let roles = self.roles(mesh, phase);
        mesh.iter()
            .map(|rank| {
                let at = roles.iter().position(|r| r.ranks.contains(&rank));
                at.map(|at| phase[at]).ok_or_else(|| format!("no program for rank {rank}"))
            })
            .collect()
    }

    /// The ranks of each program's role, for programs of one phase.
    pub(crate) fn roles(&self, mesh: &Mesh, phase: &[&Program]) -> Vec<RoleRanks> {
        let names: Vec<&str> = phase.iter().map(|p| p.role.as_str()).collect();
        RoleRanks::cast(mesh, &names, &self.ranks)
    }
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(|w| w.trim_start_matches('%').to_string()).collect()
}

/// `[2, 2] = 1 2 3 4`, `[2, 2] = iota`, `full 3` or `normal 7`; a scalar is a bare number.
fn tensor(text: &str) -> Result<Tensor, String> {
    let Some(rest) = text.strip_prefix('[') else {
        return text.parse().map(Tensor::scalar).map_err(|_| format!("`{text}` is no number"));
    };
    let (shape, values) =
        rest.split_once("] =").ok_or_else(|| format!("`{text}`: write [extents] = values"))?;
    let shape: Vec<usize> = shape
        .split(',')
        .map(|n| n.trim().parse().map_err(|_| format!("extent `{n}`")))
        .collect::<Result<_, _>>()?;
    let count: usize = shape.iter().product();
    let words: Vec<&str> = values.split_whitespace().collect();
    let number = |w: &str| w.parse::<f64>().map_err(|_| format!("`{w}` is no number"));
    match words[..] {
        ["iota"] => Ok(Tensor::from_fn(&shape, |i| i as f64)),
        ["full", x] => Ok(Tensor::full(&shape, number(x)?)),
        ["normal", seed] => {
            let seed = seed.parse().map_err(|_| format!("seed `{seed}`"))?;
            let mut x = vec![0.0f32; count];
            normals(DrawKey { seed, chunk: 0, draw: 0 }, 0, &mut x);
            Ok(Tensor::new(&shape, x.into_iter().map(f64::from).collect()))
        }
        _ => {
            let data = words.iter().map(|w| number(w)).collect::<Result<Vec<_>, _>>()?;
            if data.len() == count {
                Ok(Tensor::new(&shape, data))
            } else {
                Err(format!("{} values for {shape:?}", data.len()))
            }
        }
    }
}
