//! Meshes of array programs: which sizes of its axes a machine can run, and what a call costs on each.

use std::collections::BTreeMap;

use tessera::arrays::{ArrayFunction, check_second_tier, lower_functions};
use tessera_base::{Bytes, Code, Diagnostic, Diagnostics};
use tessera_cost::MachineModel;
use tessera_ir::Bundle;
use tessera_mesh::{Axis, Mesh, RankMap};
use tessera_plan::layouts::StreamOverlap;
use tessera_plan::search::{Objective, Reason};
use tessera_plan::video::{RankMemory, estimate_call, host_expert_bytes, memory_by_role};

use crate::codes::T1242;
use crate::format::format_ns;

/// Number of meshes that a table lists.
const MAX_ROWS: usize = 16;

/// The question on which mesh the functions of one run shall be planned.
#[derive(Debug, Clone)]
pub struct ArrayQuery {
    /// The functions, whose programs every rank loads.
    pub functions: Vec<ArrayFunction>,
    /// The axes whose sizes are searched, in nesting order.
    pub axes: Vec<Axis>,
    /// The machine.
    pub machine: MachineModel,
    /// Number of devices of it, which is the number of ranks.
    pub devices: u32,
    /// What makes one mesh better than another.
    pub objective: Objective,
    /// The streams that may run at the same time.
    pub overlap: StreamOverlap,
}

/// The estimated cost of a call of every program on one mesh.
#[derive(Debug, Clone, PartialEq)]
pub struct ArrayCost {
    /// The mesh.
    pub mesh: Mesh,
    /// Time of the call, in nanoseconds.
    pub ns: f64,
    /// Time of collectives that no compute hides, as a mean per rank, in nanoseconds.
    pub exposed_ns: f64,
    /// Bytes that all ranks together send.
    pub sent_bytes: f64,
    /// Time for which the first grouped matmuls of layers wait for experts from the second tier of memory, on the rank that waits
    /// longest, in nanoseconds.
    pub fetch_wait_ns: f64,
    /// Expected bytes of these experts.
    pub fetched_bytes: f64,
    /// Floating-point operations of all ranks.
    pub flops: f64,
    /// Planned memory of the fullest rank.
    pub memory: Bytes,
}

/// The meshes of a query.
#[derive(Debug, Clone)]
pub struct ArraySearch {
    /// The legal meshes, best first.
    pub legal: Vec<ArrayCost>,
    /// The other ones, with everything that refuses each.
    pub refused: Vec<(Mesh, Diagnostics)>,
}

/// Estimates a call of every program of a bundle on a machine, also if the machine is too small for it. Layers whose
/// experts lie in two tiers of memory wait for the experts that even routing leads to and that a rank does not hold, as
/// [`price_expert_fetches`](tessera_cost::program_cost::price_expert_fetches) says.
///
/// # Errors
/// T1115 if ranks form a wait cycle, which no sealed plan has, and T0806 for experts in two tiers of memory on a machine
/// that has one.
pub fn estimate_arrays(bundle: &Bundle, machine: &MachineModel) -> Result<ArrayCost, Diagnostics> {
    check_second_tier(bundle, &machine.cluster).map_err(|d| vec![d])?;
    let phases: Vec<String> = bundle.phases.iter().map(|phase| phase.name.clone()).collect();
    let estimate = estimate_call(bundle, "every program", &phases, machine, false).map_err(|d| vec![*d])?;
    Ok(ArrayCost {
        mesh: bundle.mesh,
        ns: estimate.ns,
        exposed_ns: estimate.exposed_ns(),
        sent_bytes: estimate.sent_bytes.iter().sum(),
        fetch_wait_ns: estimate.fetches.ns,
        fetched_bytes: estimate.fetches.bytes,
        flops: estimate.flops,
        memory: fullest_rank(bundle).total_bytes(),
    })
}

/// Checks that a machine has a device for every rank of a bundle, with memory for it.
///
/// # Errors
/// T1201 for more ranks than devices, T1217 for a rank that needs more memory than a device has, or more host memory
/// than there is for each device, T0806 for experts in two tiers of memory on a machine that has one.
pub fn check_fit(bundle: &Bundle, machine: &MachineModel) -> Result<(), Diagnostics> {
    let cluster = &machine.cluster;
    let (ranks, devices) = (bundle.mesh.world_size(), cluster.device_count());
    let mut found = Vec::new();
    if ranks > devices {
        found.push(
            Diagnostic::error(
                Reason::Ranks.code(),
                format!("{ranks} ranks, and {} has {devices} devices", cluster.name),
            )
            .with_label("mesh", bundle.mesh.to_string())
            .with_hint("use a smaller mesh, or a cluster.toml with more racks"),
        );
    }
    let needs = fullest_rank(bundle);
    let (total, capacity) = (needs.total_bytes(), Bytes(cluster.device.memory_bytes.value as u64));
    if total > capacity {
        let what = format!("the fullest rank needs {total}, and {} has {capacity}", cluster.device.name);
        let parts =
            [("weights", needs.weights), ("inputs", needs.inputs), ("temporaries", needs.temporaries)];
        let parts: Vec<String> = parts.iter().map(|(name, bytes)| format!("{name} {bytes}")).collect();
        found.push(
            Diagnostic::error(Reason::Memory.code(), what)
                .with_label("mesh", bundle.mesh.to_string())
                .with_label("the rank", parts.join(", "))
                .with_hint("shard more arrays, or shard them over a larger axis"),
        );
    }
    match check_second_tier(bundle, cluster) {
        Ok(()) => found.extend(check_host_memory(bundle, machine)),
        Err(d) => found.push(d),
    }
    if found.is_empty() { Ok(()) } else { Err(found) }
}

/// Returns an error if the experts of a rank that lie in host memory need more than there is for each device.
fn check_host_memory(bundle: &Bundle, machine: &MachineModel) -> Option<Diagnostic> {
    let cluster = &machine.cluster;
    let (experts, held) = (host_expert_bytes(bundle), Bytes(cluster.host_bytes.value as u64));
    (experts > held).then(|| {
        let what = format!(
            "the experts of a rank need {experts} of host memory, and {} has {held} per device",
            cluster.name
        );
        Diagnostic::error(Reason::Memory.code(), what)
            .with_label("mesh", bundle.mesh.to_string())
            .with_hint("shard the experts over a larger axis")
    })
}

fn fullest_rank(bundle: &Bundle) -> RankMemory {
    memory_by_role(bundle).into_iter().max_by_key(RankMemory::total_bytes).unwrap_or_default()
}

impl ArrayQuery {
    /// Estimates the programs on one mesh. They are planned, and not sealed.
    ///
    /// # Errors
    /// T1201 for a mesh of another number of ranks, T1217, and what does not fit the mesh: T0097, T0107, T0614 or T0615.
    pub fn estimate_mesh(&self, mesh: &Mesh) -> Result<ArrayCost, Diagnostics> {
        if mesh.mesh_size() != self.devices {
            let sizes: Vec<String> =
                mesh.active_axes().map(|axis| mesh.axis_size(axis).to_string()).collect();
            let factors = if sizes.len() > 1 { format!("{} = ", sizes.join("·")) } else { String::new() };
            let what = format!("{factors}{} ranks, {} devices", mesh.mesh_size(), self.devices);
            let d = Diagnostic::error(Reason::Ranks.code(), what).with_label("mesh", mesh.to_string());
            return Err(vec![d]);
        }
        let rank_map = RankMap::from_device_kind(mesh, "rank");
        let bundle = lower_functions(&self.functions, mesh, rank_map, &self.overlap)?;
        check_fit(&bundle, &self.machine)?;
        estimate_arrays(&bundle, &self.machine)
    }

    /// Estimates the programs on every mesh of the axes with a rank for each device.
    ///
    /// # Errors
    /// T1201 for no device or more than the machine has, T1242 if no mesh is legal, with the reasons.
    pub fn search_meshes(&self) -> Result<ArraySearch, Diagnostics> {
        let all = self.machine.cluster.device_count();
        if self.devices == 0 || self.devices > all {
            let what = format!("{} devices, and {} has {all}", self.devices, self.machine.cluster.name);
            return Err(vec![Diagnostic::error(Reason::Ranks.code(), what)]);
        }
        let mut search = ArraySearch { legal: Vec::new(), refused: Vec::new() };
        for mesh in self.list_meshes() {
            match self.estimate_mesh(&mesh) {
                Ok(cost) => search.legal.push(cost),
                Err(why) => search.refused.push((mesh, why)),
            }
        }
        // Meshes of equal cost keep the order in which they were listed.
        search.legal.sort_by(|a, b| {
            self.rank_cost(a).partial_cmp(&self.rank_cost(b)).unwrap_or(std::cmp::Ordering::Equal)
        });
        if !search.legal.is_empty() {
            return Ok(search);
        }
        let what =
            format!("none of {} meshes is legal for {}", search.refused.len(), self.describe_devices());
        let d = Diagnostic::error(&T1242, what)
            .with_hint("state fewer devices, a mesh, or layouts over other axes");
        Err(vec![search.count_reasons().into_iter().fold(d, |d, (code, (count, mesh, example))| {
            d.with_note(format!("{count} of them, {}: {mesh}: {example} ({})", code.title, code.id))
        })])
    }

    /// Says how a mesh compares with the one that was chosen, or which constraints it breaks. Axes without a size have one
    /// rank.
    ///
    /// # Errors
    /// T0102 or T0104 for sizes that no mesh has.
    pub fn explain_mesh(&self, chosen: &Mesh, sizes: &BTreeMap<Axis, u32>) -> Result<String, Diagnostics> {
        let mesh =
            Mesh::new(Axis::ALL.map(|axis| sizes.get(&axis).copied().unwrap_or(1))).map_err(|d| vec![*d])?;
        let mut text = format!("{mesh} on {}\n", self.describe_devices());
        let cost = match self.estimate_mesh(&mesh) {
            Ok(cost) => cost,
            Err(why) => {
                text += "refused\n";
                for d in why {
                    let places = d.labels.iter().map(|label| format!("{} {}", label.location, label.message));
                    text += &format!(
                        "  {} ({}) [{}]\n",
                        d.message,
                        d.code.id,
                        places.collect::<Vec<_>>().join("; ")
                    );
                }
                return Ok(text);
            }
        };
        text += &format!("legal: {}\n", describe_cost(&cost));
        if mesh == *chosen {
            return Ok(text + "this is the mesh of the plan\n");
        }
        match self.estimate_mesh(chosen) {
            Ok(plan) => {
                text += &format!("the plan, on {chosen}: {}\n", describe_cost(&plan));
                let change = |name: &str, a: f64, b: f64| {
                    let sign = if a >= b { "+" } else { "-" };
                    format!("  {name:<28} {sign}{}\n", format_ns((a - b).abs()))
                };
                text += "compared with the plan, per call\n";
                text += &change("in total", cost.ns, plan.ns);
                text += &change("waiting for collectives", cost.exposed_ns, plan.exposed_ns);
                if cost.fetched_bytes + plan.fetched_bytes > 0.0 {
                    text += &change("waiting for experts", cost.fetch_wait_ns, plan.fetch_wait_ns);
                }
            }
            Err(_) => text += &format!("the plan, on {chosen}, does not use all {} devices\n", self.devices),
        }
        Ok(text)
    }

    /// Describes the outcome of a search as a table, best mesh first.
    #[must_use]
    pub fn describe_search(&self, search: &ArraySearch, chosen: &Mesh) -> String {
        let (legal, all) = (search.legal.len(), search.legal.len() + search.refused.len());
        let what = match self.objective {
            Objective::Latency => "the shortest call",
            Objective::Throughput => "the most calls per second and device",
            Objective::Memory => "the smallest memory of the fullest rank",
            Objective::Deadline(_) => "the most calls per second and device within the deadline",
        };
        let mut text =
            format!("  meshes of {}: {legal} of {all} are legal; {what} is best\n", self.describe_devices());
        for cost in search.legal.iter().take(MAX_ROWS) {
            let mark = if cost.mesh == *chosen { "  <- this plan" } else { "" };
            text += &format!("    {:<20} {}{mark}\n", cost.mesh.to_string(), describe_cost(cost));
        }
        if legal > MAX_ROWS {
            text += &format!("    and {} more\n", legal - MAX_ROWS);
        }
        for (code, (count, mesh, example)) in search.count_reasons() {
            text += &format!(
                "    refused: {count}, {} ({}), for example {mesh}: {example}\n",
                code.title, code.id
            );
        }
        text
    }

    /// Returns every mesh of the axes that has a rank for each device.
    fn list_meshes(&self) -> Vec<Mesh> {
        let mut partial = vec![[1u32; Axis::ALL.len()]];
        for (i, axis) in self.axes.iter().enumerate() {
            let is_last = i + 1 == self.axes.len();
            let sizes_of = |sizes: &[u32; Axis::ALL.len()]| {
                let rest = self.devices / sizes.iter().product::<u32>();
                let fits = move |n: &u32| rest.is_multiple_of(*n) && (!is_last || *n == rest);
                (1..=rest).rev().filter(fits).collect::<Vec<_>>()
            };
            partial = (partial.iter())
                .flat_map(|sizes| {
                    sizes_of(sizes).into_iter().map(|n| {
                        let mut next = *sizes;
                        next[*axis as usize] = n;
                        next
                    })
                })
                .collect();
        }
        partial.into_iter().filter_map(|sizes| Mesh::new(sizes).ok()).collect()
    }

    /// Returns the numbers that order the costs of meshes, smallest first.
    fn rank_cost(&self, cost: &ArrayCost) -> (f64, f64) {
        let memory = cost.memory.0 as f64;
        match self.objective {
            Objective::Memory => (memory, cost.ns),
            // Every mesh uses all devices, so the shortest call is also the highest throughput per device.
            Objective::Latency | Objective::Throughput | Objective::Deadline(_) => (cost.ns, memory),
        }
    }

    fn describe_devices(&self) -> String {
        let (name, all) = (&self.machine.cluster.name, self.machine.cluster.device_count());
        match self.devices == all {
            true => format!("the {all} devices of {name}"),
            false => format!("{} of the {all} devices of {name}", self.devices),
        }
    }
}

impl ArraySearch {
    /// Returns for each reason how many meshes it refuses first, with one of them and its message.
    fn count_reasons(&self) -> Vec<(&'static Code, (usize, Mesh, String))> {
        let mut by_code: BTreeMap<&str, (&'static Code, (usize, Mesh, String))> = BTreeMap::new();
        for (mesh, why) in &self.refused {
            let Some(first) = why.first() else { continue };
            let entry =
                by_code.entry(first.code.id).or_insert((first.code, (0, *mesh, first.message.clone())));
            entry.1.0 += 1;
        }
        by_code.into_values().collect()
    }
}

fn describe_cost(cost: &ArrayCost) -> String {
    let fetches = match cost.fetched_bytes > 0.0 {
        true => format!(
            " and {} for {} of experts in host memory",
            format_ns(cost.fetch_wait_ns),
            Bytes(cost.fetched_bytes as u64)
        ),
        false => String::new(),
    };
    format!(
        "{} per call, of which {} wait for collectives{fetches}; {} on the fullest rank",
        format_ns(cost.ns),
        format_ns(cost.exposed_ns),
        cost.memory
    )
}

#[cfg(test)]
mod tests {
    use tessera_mesh::{DimShard, DimShards};

    use super::*;
    use crate::machine::load_machine;

    /// Two layers over tp, whose tokens are divided over ep.
    const LAYERS: &str = "program @layers streams(compute) {
  %x = input \"x\" : f32[24, 64]
  %u = weight \"u\" : f32[96, 64]
  %d = weight \"d\" : f32[64, 96]
  %h = toperator.matmul %x, %u : f32[24, 96] @compute
  %y = toperator.matmul %h, %d : f32[24, 64] @compute
  output \"y\", %y @compute
}
";

    fn query(devices: u32, objective: Objective) -> ArrayQuery {
        let mut function = ArrayFunction::from_text(LAYERS, "layers.tir").unwrap();
        for (name, axis, dim) in [("x", Axis::Ep, 0), ("u", Axis::Tp, 0), ("d", Axis::Tp, 1)] {
            function.sources.insert(name.into(), DimShards::from_pairs([(axis, DimShard { dim, unit: 1 })]));
        }
        ArrayQuery {
            functions: vec![function],
            axes: vec![Axis::Tp, Axis::Ep],
            machine: load_machine("gb200-nvl72", None, None).unwrap(),
            devices,
            objective,
            overlap: StreamOverlap::none(),
        }
    }

    #[test]
    fn every_mesh_of_the_axes_is_priced_or_refused_once() {
        let query = query(72, Objective::Latency);
        let search = query.search_meshes().unwrap();
        let mut meshes: Vec<String> = search.legal.iter().map(|cost| cost.mesh.to_string()).collect();
        meshes.extend(search.refused.iter().map(|(mesh, _)| mesh.to_string()));
        meshes.sort();
        meshes.dedup();
        // 72 has 12 divisors.
        assert_eq!(meshes.len(), 12);
        // 24 tokens have no share for 36 or 72 ranks of ep.
        let refused: Vec<String> = search.refused.iter().map(|(mesh, _)| mesh.to_string()).collect();
        assert_eq!(refused, ["tp=2, ep=36", "ep=72"]);
        assert!(search.refused.iter().all(|(_, why)| why[0].code.id == "T0107"));
        assert!(search.legal.is_sorted_by(|a, b| a.ns <= b.ns));
        let best = search.legal[0].mesh;
        let table = query.describe_search(&search, &best);
        assert!(table.contains("10 of 12 are legal") && table.contains("<- this plan"), "{table}");
    }

    #[test]
    fn objectives_order_the_same_meshes_differently() {
        let first = |objective| query(8, objective).search_meshes().unwrap().legal[0].clone();
        let (fast, small) = (first(Objective::Latency), first(Objective::Memory));
        assert!(fast.ns <= small.ns && small.memory <= fast.memory);
        assert_eq!(first(Objective::Throughput), fast);
    }

    #[test]
    fn a_mesh_of_other_ranks_and_a_program_without_mesh_are_refused_with_numbers() {
        let query = query(8, Objective::Latency);
        let chosen: Mesh = "tp=4, ep=2".parse().unwrap();
        let sizes = |pairs: &[(Axis, u32)]| pairs.iter().copied().collect::<BTreeMap<_, _>>();
        let why = |pairs| query.explain_mesh(&chosen, &sizes(pairs)).unwrap();
        assert!(why(&[(Axis::Tp, 12), (Axis::Ep, 6)]).contains("12·6 = 72 ranks, 8 devices (T1201)"));
        assert!(why(&[(Axis::Tp, 4), (Axis::Ep, 2)]).contains("this is the mesh of the plan"));
        assert!(why(&[(Axis::Tp, 8)]).contains("waiting for collectives"));
        let mut none = query.clone();
        none.functions[0].fixed_axes = [Axis::Tp, Axis::Ep].into();
        none.functions[0].mesh = Some(tessera::arrays::DeviceMesh {
            axes: none.axes.clone(),
            mesh: "tp=3".parse().unwrap(),
            devices: Vec::new(),
        });
        let refused = none.search_meshes().unwrap_err();
        assert_eq!(refused[0].code, &T1242);
        assert!(refused[0].notes.iter().any(|note| note.contains("T0097")), "{refused:#?}");
    }
}
