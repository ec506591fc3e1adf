//! Reads the comment lines at the top of a file.

use std::collections::BTreeMap;

use tessera_base::random::{DrawKey, fill_normals};
use tessera_ir::{Communicator, GroupStatement, Program, RoleRanks};
use tessera_mesh::{Group, GroupPath, HostMap, Mesh, PlanHost, Rank};
use tessera_reference::{CallInputs, CallScalar, InputTensor, Tensor};

/// What a test file asserts about its programs; the `test:` line at its top selects it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TestKind {
    /// The file parses, or fails to parse with the marked errors.
    Parse,
    /// The file is a fragment, and its review gives the marked diagnostics.
    Fragment,
    /// The file lists the canonical text of its programs.
    Print,
    /// The verifier reports the marked diagnostics.
    Check,
    /// The file lists the outputs of its programs.
    Eval,
}

/// Keys of earlier headers and the keys that replaced them.
const RENAMED_KEYS: [(&str, &str); 3] =
    [("homeless", "no-slot"), ("share", "share-slot"), ("piece", "shard")];

/// Settings from the `// key: value` lines at the top of a test file.
#[derive(Debug)]
pub(crate) struct Header {
    pub kind: TestKind,
    /// Ranks of each role whose name does not determine them.
    pub ranks_by_role: BTreeMap<String, Vec<Rank>>,
    pub call: CallInputs,
    pub weights: BTreeMap<String, Tensor>,
    /// Text that the message of the expected fault contains.
    pub fault: Option<String>,
    /// Largest difference between numbers that count as equal.
    pub tolerance: f64,
    /// Names of the collectives that every role program issues, in order.
    pub collectives: Option<Vec<String>>,
    /// Groups of values that share one memory slot, the slot of the first value.
    pub shared_slots: Vec<Vec<String>>,
    /// Values without a memory slot.
    pub unslotted: Vec<String>,
    /// Device memory in bytes that a role may use; `None` skips the verifier's check.
    pub device_bytes: Option<u64>,
    /// Whether a communicator serves only one graph at a time.
    pub graph_mixing_off: bool,
    /// The calls that the plan allows: the name and the phases of each.
    pub calls: Vec<(String, Vec<String>)>,
    /// Hosts of the ranks, if the file states them.
    pub hosts: Option<HostMap>,
    /// Paths of groups that the file states instead of those that follow from the hosts.
    pub paths: Vec<GroupStatement>,
}

impl Header {
    pub(crate) fn read(text: &str) -> Result<Header, Vec<String>> {
        let mut h = Header {
            kind: TestKind::Parse,
            ranks_by_role: BTreeMap::new(),
            call: CallInputs::default(),
            weights: BTreeMap::new(),
            fault: None,
            tolerance: 1e-9,
            collectives: None,
            shared_slots: Vec::new(),
            unslotted: Vec::new(),
            device_bytes: None,
            graph_mixing_off: false,
            calls: Vec::new(),
            hosts: None,
            paths: Vec::new(),
        };
        let mut problems = Vec::new();
        let mut first = true;
        let mut per_rank: BTreeMap<String, Vec<Tensor>> = BTreeMap::new();
        for (i, line) in text.lines().enumerate() {
            let Some(line) = line.strip_prefix("//") else { break };
            let Some((key, value)) = line.split_once(':') else { continue };
            if let Err(why) = h.read_line(key.trim(), value.trim(), first, &mut per_rank) {
                problems.push(format!("line {}: {why}", i + 1));
            }
            first = false;
        }
        if first {
            problems.push("begin the file with `// test: parse`, fragment, print, check or eval".to_string());
        }
        h.call.inputs.extend(per_rank.into_iter().map(|(k, v)| (k, InputTensor::PerRank(v))));
        if problems.is_empty() { Ok(h) } else { Err(problems) }
    }

    fn read_line(
        &mut self,
        key: &str,
        value: &str,
        first: bool,
        per_rank: &mut BTreeMap<String, Vec<Tensor>>,
    ) -> Result<(), String> {
        let (key, name) = key.split_once(' ').map_or((key, ""), |(k, n)| (k, n.trim()));
        if first != (key == "test") {
            return Err("the key `test` must come first and only once".to_string());
        }
        match key {
            "test" => {
                self.kind = match value {
                    "parse" => TestKind::Parse,
                    "fragment" => TestKind::Fragment,
                    "print" => TestKind::Print,
                    "check" => TestKind::Check,
                    "eval" => TestKind::Eval,
                    other => return Err(format!("unknown test `{other}`")),
                }
            }
            "ranks" => {
                self.ranks_by_role.insert(name.to_string(), parse_ranks(value)?);
            }
            "int" => {
                let i = value.parse().map_err(|_| format!("`{value}` is not an integer"))?;
                self.call.scalars.insert(name.to_string(), CallScalar::Int(i));
            }
            "float" => {
                self.call.scalars.insert(name.to_string(), CallScalar::Float(parse_tensor(value)?));
            }
            "input" => {
                self.call.inputs.insert(name.to_string(), InputTensor::Global(parse_tensor(value)?));
            }
            // One line per rank, in rank order.
            "shard" => per_rank.entry(name.to_string()).or_default().push(parse_tensor(value)?),
            "weight" => {
                self.weights.insert(name.to_string(), parse_tensor(value)?);
            }
            "fault" => self.fault = Some(value.to_string()),
            "tolerance" => {
                self.tolerance = value.parse().map_err(|_| format!("invalid tolerance `{value}`"))?
            }
            "collectives" => self.collectives = Some(split_names(value)),
            "share-slot" => self.shared_slots.push(split_names(value)),
            "no-slot" => self.unslotted.extend(split_names(value)),
            "device-bytes" => {
                self.device_bytes =
                    Some(value.parse().map_err(|_| format!("invalid number of bytes `{value}`"))?);
            }
            "graph-mixing" => {
                self.graph_mixing_off = match value {
                    "off" => true,
                    "on" => false,
                    other => return Err(format!("graph-mixing `{other}`: write on or off")),
                }
            }
            "hosts" => self.hosts = Some(parse_hosts(value)?),
            "path" => self.paths.push(parse_path(name, value)?),
            "phases" => self.calls.push((name.to_string(), split_names(value))),
            "note" | "error-anywhere" => {}
            other => {
                let renamed = RENAMED_KEYS.iter().find(|(old, _)| *old == other);
                let hint = renamed.map_or(String::new(), |(_, new)| format!("; it is now `{new}`"));
                return Err(format!("unknown key `{other}`{hint}"));
            }
        }
        Ok(())
    }

    /// Returns the program of each rank, for the programs of one phase.
    pub(crate) fn programs_by_rank<'a>(
        &self,
        mesh: &Mesh,
        phase: &[&'a Program],
    ) -> Result<Vec<&'a Program>, String> {
        let roles = self.role_ranks(mesh, phase);
        mesh.iter()
            .map(|rank| {
                let at = roles.iter().position(|r| r.ranks.contains(&rank));
                at.map(|at| phase[at]).ok_or_else(|| format!("no program for rank {rank}"))
            })
            .collect()
    }

    /// Returns the ranks of each program's role, for the programs of one phase.
    pub(crate) fn role_ranks(&self, mesh: &Mesh, phase: &[&Program]) -> Vec<RoleRanks> {
        let names: Vec<&str> = phase.iter().map(|p| p.role.as_str()).collect();
        RoleRanks::assign_ranks(mesh, &names, &self.ranks_by_role)
    }
}

/// Parses `0 1 | 2 3`: the ranks of each host, each host in a switch domain of its own.
fn parse_hosts(text: &str) -> Result<HostMap, String> {
    let host = |(domain, ranks): (u32, &str)| Ok(PlanHost { domain, ranks: parse_ranks(ranks)? });
    Ok(HostMap::new((0..).zip(text.split('|')).map(host).collect::<Result<_, String>>()?))
}

/// Parses the path `network` of the group `tp/2` in `path tp/2: 0 2 = network`. The ranks of transfers
/// stand as `0 > 2`.
fn parse_path(group: &str, text: &str) -> Result<GroupStatement, String> {
    let wrong = || format!("`{text}`: write the ranks of {group:?} = a path, such as `0 1 = network`");
    let (members, path) = text.split_once('=').ok_or_else(wrong)?;
    let group = Group::parse(group).ok_or_else(wrong)?;
    let is_transfer = members.contains('>');
    let members = parse_ranks(&members.replace('>', " "))?;
    let path = GroupPath::from_name(path.trim()).ok_or_else(wrong)?;
    Ok(GroupStatement { communicator: Communicator { group, is_transfer, members }, path })
}

fn parse_ranks(text: &str) -> Result<Vec<Rank>, String> {
    let ranks: Result<Vec<Rank>, _> = text.split_whitespace().map(|r| r.parse().map(Rank)).collect();
    ranks.map_err(|_| format!("invalid ranks `{text}`"))
}

fn split_names(text: &str) -> Vec<String> {
    text.split_whitespace().map(|w| w.trim_start_matches('%').to_string()).collect()
}

/// Parses `[2, 2] = 1 2 3 4`, `[2, 2] = iota`, `full 3` or `normal 7`. A number without a shape is
/// a scalar.
fn parse_tensor(text: &str) -> Result<Tensor, String> {
    let Some(rest) = text.strip_prefix('[') else {
        return text.parse().map(Tensor::scalar).map_err(|_| format!("`{text}` is not a number"));
    };
    let (shape, values) =
        rest.split_once("] =").ok_or_else(|| format!("`{text}`: write [extents] = values"))?;
    let shape: Vec<usize> = shape
        .split(',')
        .map(|n| n.trim().parse().map_err(|_| format!("invalid extent `{n}`")))
        .collect::<Result<_, _>>()?;
    let count: usize = shape.iter().product();
    let tokens: Vec<&str> = values.split_whitespace().collect();
    let number = |w: &str| w.parse::<f64>().map_err(|_| format!("`{w}` is not a number"));
    match tokens[..] {
        ["iota"] => Ok(Tensor::from_fn(&shape, |i| i as f64)),
        ["full", x] => Ok(Tensor::full(&shape, number(x)?)),
        ["normal", seed] => {
            let seed = seed.parse().map_err(|_| format!("invalid seed `{seed}`"))?;
            let mut x = vec![0.0f32; count];
            fill_normals(DrawKey { seed, chunk: 0, draw: 0 }, 0, &mut x);
            Ok(Tensor::new(&shape, x.into_iter().map(f64::from).collect()))
        }
        _ => {
            let data = tokens.iter().map(|w| number(w)).collect::<Result<Vec<_>, _>>()?;
            if data.len() == count {
                Ok(Tensor::new(&shape, data))
            } else {
                Err(format!("{} values for {shape:?}", data.len()))
            }
        }
    }
}
