//! What the programs of a plan read and return, as whole arrays.

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, Diagnostics, closest_name};
use tessera_ir::{Op, Opcode, Program, Type, WeightLoad};
use tessera_mesh::{Axis, AxisLayout, Layout, Mesh, Rank};
use tessera_runtime::array_director::ArrayRequest;
use tessera_runtime::wire::{PhaseCall, ScalarArg, Tensor, Tensors};
use tessera_verify::SealedPlan;

use super::device_array::ArrayValues;
use super::host_array::HostArray;
use crate::codes::{T0087, T0090, T0091};
use crate::engine::call_tensor_name;
use crate::shard_copy::ArrayShard;

/// Begins the name of each phase of a plan of array programs; the name of the program follows.
pub(super) const PHASE_PREFIX: &str = "array.";

/// An array that a program reads or returns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArrayPort {
    /// Name in the program.
    pub name: String,
    /// Extents of the whole array, outermost first.
    pub shape: Vec<u64>,
}

impl ArrayPort {
    /// Returns the bytes of the array.
    pub(super) fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>().saturating_mul(4)
    }
}

/// A program of a plan.
#[derive(Debug, Clone)]
pub struct ArrayProgram {
    /// The arrays that the program reads, in order of name.
    pub inputs: Vec<ArrayPort>,
    /// The arrays that the program returns, in order of name.
    pub outputs: Vec<ArrayPort>,
    /// Name of the phase in the sealed plan.
    phase: String,
    /// The scalars of the program, which are equal in every call.
    constants: Vec<(String, ScalarArg)>,
    /// The shard of each input that each rank of the mesh reads, by name.
    input_shards: BTreeMap<String, BTreeMap<u32, ArrayShard>>,
    /// The shard of each output on each rank of the mesh, in the order of `outputs`.
    shards: Vec<BTreeMap<u32, ArrayShard>>,
}

/// The programs of a plan, with what they share.
#[derive(Debug)]
pub(super) struct ArrayPrograms {
    /// The programs by name.
    pub(super) by_name: BTreeMap<String, ArrayProgram>,
    /// The whole shapes of the weights that programs read, by name.
    pub(super) weights: BTreeMap<String, Vec<u64>>,
    /// Groups of ranks that hold equal shards of every output, each in ascending order, by their first ranks.
    pub(super) output_groups: Vec<Vec<u32>>,
}

impl ArrayPrograms {
    /// Reads what the programs of a sealed plan read and return.
    ///
    /// # Errors
    /// T0090 for every property that a call of arrays does not have.
    pub(super) fn read(
        sealed: &SealedPlan,
        constants: &BTreeMap<String, Vec<f32>>,
    ) -> Result<ArrayPrograms, Diagnostics> {
        let mesh = sealed.mesh();
        let ranks: Vec<Rank> = mesh.inner_ranks().collect();
        let mut found = Vec::new();
        let mut weights = Arrays::default();
        let mut by_name = BTreeMap::new();
        for phase in sealed.phase_names() {
            let name = phase.strip_prefix(PHASE_PREFIX).unwrap_or(phase);
            let (mut inputs, mut outputs) = (Arrays::default(), Arrays::default());
            let mut scalars: BTreeMap<String, ScalarArg> = BTreeMap::new();
            let mut shards: BTreeMap<String, BTreeMap<u32, ArrayShard>> = BTreeMap::new();
            let mut input_shards = shards.clone();
            for rank in &ranks {
                let Some(program) = sealed.rank_program(phase, *rank) else { continue };
                found.extend(find_refused_op(name, program));
                found.extend(read_scalars(name, program, constants, &mut scalars));
                inputs.add(name, program, *rank, Opcode::Input, &mut found);
                weights.add(name, program, *rank, Opcode::Weight, &mut found);
                outputs.add(name, program, *rank, Opcode::Output, &mut found);
                for (kind, shards) in [(Opcode::Output, &mut shards), (Opcode::Input, &mut input_shards)] {
                    for (array, ty) in list_arrays(program, kind) {
                        shards.entry(array).or_default().insert(rank.0, shard_of(ty, mesh, *rank));
                    }
                }
            }
            if outputs.0.is_empty() {
                let what = format!("`{name}` returns nothing");
                found.push(Diagnostic::error(&T0090, what).with_hint("let it return an array"));
            }
            found.extend(find_missing_shard(name, &shards, &ranks));
            let program = ArrayProgram {
                inputs: inputs.into_ports(),
                outputs: outputs.into_ports(),
                phase: phase.clone(),
                constants: scalars.into_iter().collect(),
                input_shards,
                shards: shards.into_values().collect(),
            };
            by_name.insert(name.to_string(), program);
        }
        // The ranks of a role repeat its findings.
        found.dedup_by(|a, b| a.message == b.message);
        if !found.is_empty() {
            return Err(found);
        }
        let weights = weights.0.into_iter().map(|(name, array)| (name, array.shape)).collect();
        Ok(ArrayPrograms { output_groups: group_ranks(&ranks, &by_name), by_name, weights })
    }

    /// Finds a program by its name.
    ///
    /// # Errors
    /// T0091 if the plan has no such program.
    pub(super) fn get(&self, name: &str) -> Result<&ArrayProgram, Diagnostic> {
        self.by_name.get(name).ok_or_else(|| {
            let d = Diagnostic::error(&T0091, format!("the plan has no program `{name}`"));
            match closest_name(name, self.by_name.keys().map(String::as_str)) {
                Some(near) => d.with_hint(format!("did you mean `{near}`?")),
                None => d.with_label("the plan", format!("has {}", list_names(self.by_name.keys()))),
            }
        })
    }

    /// Returns the scalars of the program that runs in a phase; none for a phase that the plan does not have, which the
    /// leader refuses.
    pub(super) fn constants_of(&self, phase: &str) -> Vec<(String, ScalarArg)> {
        let program = phase.strip_prefix(PHASE_PREFIX).and_then(|name| self.by_name.get(name));
        program.map_or_else(Vec::new, |program| program.constants.clone())
    }

    /// Checks that arrays are the weights of the plan, each with its shape.
    ///
    /// # Errors
    /// T0091 for every weight that is missing, unknown or of another shape.
    pub(super) fn check_weights(&self, arrays: &BTreeMap<String, HostArray>) -> Result<(), Diagnostics> {
        let ports =
            self.weights.iter().map(|(name, shape)| ArrayPort { name: name.clone(), shape: shape.clone() });
        check_arrays("weight", "the plan", &ports.collect::<Vec<_>>(), &shapes_of(arrays))
    }
}

/// Checks that arrays are the weights of a program or a plan, with these names and whole shapes.
///
/// # Errors
/// T0091 for every weight that is missing, unknown or of another shape.
pub fn check_weight_shapes(
    shapes: &[(String, Vec<u64>)],
    arrays: &BTreeMap<String, HostArray>,
) -> Result<(), Diagnostics> {
    let ports = shapes.iter().map(|(name, shape)| ArrayPort { name: name.clone(), shape: shape.clone() });
    check_arrays("weight", "the program", &ports.collect::<Vec<_>>(), &shapes_of(arrays))
}

fn shapes_of(arrays: &BTreeMap<String, HostArray>) -> BTreeMap<&str, &[u64]> {
    arrays.iter().map(|(name, array)| (name.as_str(), array.shape())).collect()
}

impl ArrayProgram {
    /// Converts whole outputs, as a leader assembled them, to arrays.
    ///
    /// # Errors
    /// T0087 if an output is missing or has another shape.
    pub(super) fn take_whole_outputs(
        &self,
        outputs: &Tensors,
    ) -> Result<BTreeMap<String, HostArray>, Diagnostic> {
        let arrays = self.outputs.iter().map(|port| {
            let tensor = outputs.get(&port.name).filter(|t| t.manifest_entry().shape == port.shape);
            let values = tensor.and_then(Tensor::to_f32).ok_or_else(|| {
                Diagnostic::error(
                    &T0087,
                    format!("the leader did not return `{}` of @{}", port.name, self.phase),
                )
            })?;
            Ok((port.name.clone(), HostArray::from_vec(port.shape.clone(), values)))
        });
        arrays.collect()
    }

    /// Makes the request of a call with these inputs, which carries those in host memory.
    ///
    /// # Errors
    /// T0091 for every input that is missing, unknown or of another shape.
    pub(super) fn make_request(
        &self,
        inputs: &BTreeMap<String, ArrayValues>,
    ) -> Result<ArrayRequest, Diagnostics> {
        let name = self.phase.strip_prefix(PHASE_PREFIX).unwrap_or(&self.phase);
        let shapes = inputs.iter().map(|(name, array)| (name.as_str(), array.shape())).collect();
        check_arrays("input", &format!("`{name}`"), &self.inputs, &shapes)?;
        let tensors = self.inputs.iter().filter_map(|port| {
            let tensor_name = call_tensor_name(&self.phase, &port.name);
            let ArrayValues::Host(array) = inputs.get(&port.name)? else { return None };
            Some(Tensor::from_f32(&tensor_name, &port.shape, array.values()))
        });
        let inputs = Tensors(tensors.collect::<Result<_, _>>().map_err(|d| vec![d])?);
        Ok(ArrayRequest { phase: PhaseCall::new(self.phase.clone(), self.constants.clone()), inputs })
    }

    /// Returns the shard of an input that a rank reads; `None` if the rank does not read it.
    pub(super) fn input_shard(&self, name: &str, rank: Rank) -> Option<&ArrayShard> {
        self.input_shards.get(name)?.get(&rank.0)
    }

    /// Returns the shard of an output that a rank returns; `None` for another name.
    pub(super) fn output_shard(&self, name: &str, rank: Rank) -> Option<&ArrayShard> {
        let at = self.outputs.iter().position(|port| port.name == name)?;
        self.shards[at].get(&rank.0)
    }

    /// Assembles whole outputs from those of a call: of each group of ranks in turn, the outputs of its first rank.
    ///
    /// # Errors
    /// T0087 if an output is missing or has other extents than its shard.
    pub(super) fn assemble_outputs(
        &self,
        returned: &Tensors,
        output_groups: &[Vec<u32>],
    ) -> Result<BTreeMap<String, HostArray>, Diagnostic> {
        let (per_group, groups) = (self.outputs.len(), output_groups.len());
        if returned.0.len() != per_group * groups {
            let what = format!("@{} returned {} arrays", self.phase, returned.0.len());
            return Err(Diagnostic::error(&T0087, what)
                .with_label("the plan", format!("{per_group} from each of {groups} groups of ranks")));
        }
        let mut wholes: Vec<Vec<f32>> =
            self.outputs.iter().map(|port| vec![0.0; port.shape.iter().product::<u64>() as usize]).collect();
        for (group, tensors) in output_groups.iter().zip(returned.0.chunks(per_group)) {
            for ((port, shards), whole) in self.outputs.iter().zip(&self.shards).zip(&mut wholes) {
                let name = call_tensor_name(&self.phase, &port.name);
                let tensor = tensors.iter().find(|t| t.name() == name);
                let shard = group.first().and_then(|rank| shards.get(rank));
                let values = tensor.and_then(Tensor::to_f32);
                match (tensor, values, shard) {
                    (Some(tensor), Some(values), Some(shard))
                        if tensor.manifest_entry().shape == shard.shape() =>
                    {
                        shard.copy_into(whole, &values);
                    }
                    _ => {
                        let what = format!("ranks {group:?} did not return their shard of `{}`", port.name);
                        return Err(Diagnostic::error(&T0087, what));
                    }
                }
            }
        }
        let arrays = self.outputs.iter().zip(wholes);
        Ok(arrays
            .map(|(port, whole)| (port.name.clone(), HostArray::from_vec(port.shape.clone(), whole)))
            .collect())
    }
}

/// The arrays of one kind that programs name, by name.
#[derive(Default)]
struct Arrays(BTreeMap<String, NamedArray>);

struct NamedArray {
    shape: Vec<u64>,
    layout: Layout,
    /// The rank and the program that named the array first.
    first: (Rank, String),
}

impl Arrays {
    /// Adds the arrays of a program of a rank, and reports those that differ from what an earlier one says.
    fn add(&mut self, name: &str, program: &Program, rank: Rank, kind: Opcode, found: &mut Diagnostics) {
        for (array, ty) in list_arrays(program, kind) {
            let shape = ty.layout.global_shape(&ty.shape, &program.mesh);
            let Some(known) = self.0.get(&array) else {
                let first = (rank, name.to_string());
                self.0.insert(array, NamedArray { shape, layout: ty.layout, first });
                continue;
            };
            // Ranks may read an array in several layouts, but the shards that they return must fit together.
            if known.shape != shape || (kind == Opcode::Output && known.layout != ty.layout) {
                let (first, program) = &known.first;
                let what = format!("{} `{array}` has two types", describe_kind(kind));
                found.push(
                    Diagnostic::error(&T0090, what)
                        .with_label(
                            format!("`{program}` on rank {first}"),
                            describe_array(&known.shape, &known.layout),
                        )
                        .with_label(format!("`{name}` on rank {rank}"), describe_array(&shape, &ty.layout)),
                );
            }
        }
    }

    fn into_ports(self) -> Vec<ArrayPort> {
        self.0.into_iter().map(|(name, array)| ArrayPort { name, shape: array.shape }).collect()
    }
}

fn describe_kind(kind: Opcode) -> &'static str {
    match kind {
        Opcode::Input => "the input",
        Opcode::Weight => "the weight",
        _ => "the output",
    }
}

/// Lists the inputs, the weights or the outputs of a program, each with its type. The scales of a weight come from the array
/// that the weight itself names.
fn list_arrays(program: &Program, kind: Opcode) -> impl Iterator<Item = (String, &Type)> {
    let is_array = move |op: &&Op| op.opcode == kind && op.weight_load() != Some(WeightLoad::E4m3Scale);
    program.ops.iter().filter(is_array).filter_map(|op| {
        let value = op.results.first().or_else(|| op.operands.first())?;
        Some((op.name.clone()?, program.type_of(*value)))
    })
}

/// Reads the scalars of a program of a rank from the constants of the plan, and reports those that it lacks.
fn read_scalars(
    name: &str,
    program: &Program,
    constants: &BTreeMap<String, Vec<f32>>,
    scalars: &mut BTreeMap<String, ScalarArg>,
) -> Diagnostics {
    let mut found = Vec::new();
    for op in program.ops.iter().filter(|op| op.opcode == Opcode::Call) {
        let (Some(scalar), Some(result)) = (&op.name, op.results.first()) else { continue };
        let ty = program.type_of(*result);
        match constants.get(scalar) {
            Some(values) if values.len() as u64 == ty.element_count() => {
                let arg = match values[..] {
                    [value] if ty.shape.is_empty() => ScalarArg::from_f32(value),
                    _ => ScalarArg::from_f32s(values),
                };
                scalars.insert(scalar.clone(), arg);
            }
            stated => {
                let what = format!("`{name}` reads the scalar `{scalar}` {:?}", ty.shape);
                let has = stated.map_or("no number".into(), |values| format!("{} numbers", values.len()));
                found.push(
                    Diagnostic::error(&T0090, what).with_label("the plan", format!("states {has} for it")),
                );
            }
        }
    }
    found
}

/// Returns why a program is no program of arrays.
fn find_refused_op(name: &str, program: &Program) -> Option<Diagnostic> {
    let refuse = |what: String, why: &str| Some(Diagnostic::error(&T0090, what).with_note(why.to_string()));
    if let Some(buffer) = program.buffers.first() {
        let what = format!("`{name}` has the buffer `{}`", buffer.name);
        return refuse(what, "a call of an array program leaves nothing behind for the next one");
    }
    for op in &program.ops {
        let array = op.name.as_deref().unwrap_or_default();
        let load = op.weight_load();
        if let Some(load) = load.filter(|l| !matches!(l, WeightLoad::E4m3 | WeightLoad::E4m3Scale)) {
            let what =
                format!("`{name}` reads the weight `{array}` with the transformation `{}`", load.name());
            return refuse(what, "the weights of array programs are read as they are, or quantized");
        }
    }
    None
}

fn describe_array(shape: &[u64], layout: &Layout) -> String {
    let axes = Axis::ALL.into_iter().filter(|axis| layout.on_axis(*axis) != AxisLayout::Replicated);
    let axes = axes.map(|axis| format!(" {axis}: {}", layout.on_axis(axis)));
    format!("f32{shape:?}{}", axes.collect::<String>())
}

fn shard_of(ty: &Type, mesh: &Mesh, rank: Rank) -> ArrayShard {
    ArrayShard {
        whole: ty.layout.global_shape(&ty.shape, mesh),
        ranges: ty.layout.global_ranges(&ty.shape, mesh, mesh.coord_of(rank)),
    }
}

/// Returns an output that a rank does not return.
fn find_missing_shard(
    name: &str,
    shards: &BTreeMap<String, BTreeMap<u32, ArrayShard>>,
    ranks: &[Rank],
) -> Option<Diagnostic> {
    shards.iter().find_map(|(output, by_rank)| {
        let rank = ranks.iter().find(|rank| !by_rank.contains_key(&rank.0))?;
        let what = format!("rank {rank} does not return `{output}` of `{name}`, but others do");
        Some(Diagnostic::error(&T0090, what))
    })
}

/// Groups the ranks that hold equal shards of every output of every program.
fn group_ranks(ranks: &[Rank], programs: &BTreeMap<String, ArrayProgram>) -> Vec<Vec<u32>> {
    let mut groups: BTreeMap<Vec<&ArrayShard>, Vec<u32>> = BTreeMap::new();
    for rank in ranks {
        let shards =
            programs.values().flat_map(|p| p.shards.iter().filter_map(|by_rank| by_rank.get(&rank.0)));
        groups.entry(shards.collect()).or_default().push(rank.0);
    }
    let mut groups: Vec<Vec<u32>> = groups.into_values().collect();
    groups.sort();
    groups
}

/// Returns T0091 for every array that is missing, unknown or of another shape.
fn check_arrays(
    kind: &str,
    of: &str,
    ports: &[ArrayPort],
    shapes: &BTreeMap<&str, &[u64]>,
) -> Result<(), Diagnostics> {
    let mut found = Vec::new();
    let takes = || format!("takes {}", list_names(ports.iter().map(|port| &port.name)));
    for port in ports {
        match shapes.get(port.name.as_str()) {
            None => found.push(
                Diagnostic::error(&T0091, format!("the {kind} `{}` of {of} is missing", port.name))
                    .with_label(of.to_string(), takes()),
            ),
            Some(shape) if **shape != port.shape => found.push(
                Diagnostic::error(&T0091, format!("the {kind} `{}` of {of} has another shape", port.name))
                    .with_label(of.to_string(), format!("f32{:?}", port.shape))
                    .with_label("given", format!("f32{shape:?}")),
            ),
            Some(_) => {}
        }
    }
    for name in shapes.keys().filter(|name| ports.iter().all(|port| port.name != **name)) {
        let d = Diagnostic::error(&T0091, format!("{of} has no {kind} `{name}`"))
            .with_label(of.to_string(), takes());
        found.push(match closest_name(name, ports.iter().map(|port| port.name.as_str())) {
            Some(near) => d.with_hint(format!("did you mean `{near}`?")),
            None => d,
        });
    }
    if found.is_empty() { Ok(()) } else { Err(found) }
}

fn list_names<'a>(names: impl Iterator<Item = &'a String>) -> String {
    let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
    if names.is_empty() { "none".to_string() } else { names.join(", ") }
}
