//! The folder of a function of arrays: the text of its program, how its arrays are sharded, and its weights.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};
use tessera_base::{Diagnostic, Diagnostics, closest_name};
use tessera_ir::{Opcode, Program, ValueId, print};
use tessera_mesh::{Axis, DimName, DimShard, DimShards, Mesh};
use tessera_plan::DtypePolicy;

use super::array_function::{ArrayFunction, DeviceMesh, FunctionOutput, find_value, list_named};
use super::array_weights::{read_weights_file, write_weights_file};
use super::host_array::HostArray;
use crate::codes::T0096;
use crate::files::{StagedFolder, read_text};
use crate::plan_folder::to_json;

/// File with the text of the program, which `tessera check` reads.
const PROGRAM_FILE: &str = "program.tir";
/// File with everything that the text of the program does not say.
const FUNCTION_FILE: &str = "function.json";
/// File with the weights.
const WEIGHTS_FILE: &str = "weights.safetensors";
/// Version of [`FunctionFile`].
const FUNCTION_VERSION: u32 = 1;

impl ArrayFunction {
    /// Writes the function into a new folder, with the weights if there are any.
    ///
    /// # Errors
    /// T0013 if the folder exists, T0014 if it cannot be written.
    pub fn write(&self, dir: &Path, weights: &BTreeMap<String, HostArray>) -> Result<(), Diagnostic> {
        let mut folder = StagedFolder::create(dir)?;
        folder.write(PROGRAM_FILE, print(&self.program).as_bytes())?;
        folder.write(FUNCTION_FILE, to_json(&FunctionFile::from_function(self)).as_bytes())?;
        if !weights.is_empty() {
            write_weights_file(weights, &folder.path_of(WEIGHTS_FILE))?;
        }
        folder.commit()
    }

    /// Reads a function and its weights from a folder; a folder without the file of weights has none.
    ///
    /// # Errors
    /// T0096, T0201 to T0205 or the errors of ops for files that hold no function, and T0501 to T0508 for weights that are
    /// not those of the program.
    pub fn read(dir: &Path) -> Result<(ArrayFunction, BTreeMap<String, HostArray>), Diagnostics> {
        let function = read_function(dir)?;
        let path = dir.join(WEIGHTS_FILE);
        let weights = match path.exists() {
            true => read_weights_file(&path, function.weights())?,
            false => BTreeMap::new(),
        };
        Ok((function, weights))
    }
}

fn read_function(dir: &Path) -> Result<ArrayFunction, Diagnostics> {
    let [program, function] = [PROGRAM_FILE, FUNCTION_FILE].map(|name| dir.join(name));
    let text = read_text(&program, &T0096).map_err(|d| vec![d])?;
    let plain = ArrayFunction::from_text(&text, &program.display().to_string())?;
    let file = function.display().to_string();
    let text = read_text(&function, &T0096).map_err(|d| vec![d])?;
    let stored: FunctionFile = serde_json::from_str(&text).map_err(|e| {
        let d = Diagnostic::error(&T0096, format!("{file} cannot be read: {e}"));
        vec![d.with_label(&file, format!("line {}, column {}", e.line(), e.column()))]
    })?;
    if stored.tessera_function != FUNCTION_VERSION {
        let d = Diagnostic::error(&T0096, "another version of tessera saved this function")
            .with_label(&file, format!("version {}", stored.tessera_function))
            .with_label("this build", format!("reads version {FUNCTION_VERSION}"));
        return Err(vec![d.with_hint("trace the function and save it again")]);
    }
    let read = stored.into_function(plain);
    read.map_err(|ds| ds.into_iter().map(|d| d.with_label(&file, "this file")).collect())
}

/// The contents of `function.json`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FunctionFile {
    tessera_function: u32,
    mesh: Option<MeshEntry>,
    dtype: String,
    rounding_seed: Option<u64>,
    deterministic: bool,
    sources: BTreeMap<String, Vec<ShardEntry>>,
    values: BTreeMap<String, Vec<ShardEntry>>,
    outputs: Vec<OutputEntry>,
    returns_one: bool,
    constants: BTreeMap<String, Vec<f32>>,
    fixed_axes: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MeshEntry {
    axes: Vec<String>,
    sizes: Vec<u32>,
    devices: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ShardEntry {
    axis: String,
    dim: usize,
    unit: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OutputEntry {
    name: String,
    dims: Vec<String>,
    units: Vec<u64>,
    shards: Option<Vec<ShardEntry>>,
}

impl FunctionFile {
    fn from_function(function: &ArrayFunction) -> FunctionFile {
        let entries = |shards: &DimShards| {
            let entry = |(axis, shard): (Axis, DimShard)| ShardEntry {
                axis: axis.name().to_string(),
                dim: shard.dim,
                unit: shard.unit,
            };
            shards.iter().map(entry).collect::<Vec<_>>()
        };
        let names =
            |axes: &mut dyn Iterator<Item = &Axis>| axes.map(|axis| axis.name().to_string()).collect();
        FunctionFile {
            tessera_function: FUNCTION_VERSION,
            mesh: function.mesh.as_ref().map(|mesh| MeshEntry {
                axes: names(&mut mesh.axes.iter()),
                sizes: mesh.axes.iter().map(|axis| mesh.mesh.axis_size(*axis)).collect(),
                devices: mesh.devices.clone(),
            }),
            dtype: function.dtype.name().to_string(),
            rounding_seed: function.rounding_seed,
            deterministic: function.is_deterministic,
            sources: function.sources.iter().map(|(name, shards)| (name.clone(), entries(shards))).collect(),
            values: (function.values.iter())
                .map(|(id, shards)| (function.program.value(*id).name.clone(), entries(shards)))
                .collect(),
            outputs: (function.outputs.iter())
                .map(|output| OutputEntry {
                    name: output.name.clone(),
                    dims: output.dims.iter().map(|dim| dim.name().to_string()).collect(),
                    units: output.units.clone(),
                    shards: output.shards.as_ref().map(entries),
                })
                .collect(),
            returns_one: function.returns_one,
            constants: function.constants.clone(),
            fixed_axes: names(&mut function.fixed_axes.iter()),
        }
    }

    /// Adds what the file states to the program of the function.
    fn into_function(self, plain: ArrayFunction) -> Result<ArrayFunction, Diagnostics> {
        let mut found = Vec::new();
        let program = &plain.program;
        let mesh = take(&mut found, self.mesh.map(MeshEntry::into_mesh).transpose()).flatten();
        let sources = [Opcode::Input, Opcode::Weight].map(|opcode| list_named(program, opcode));
        let sources: BTreeMap<&str, ValueId> = sources.into_iter().flatten().collect();
        let sources = self.sources.into_iter().filter_map(|(name, entries)| {
            let value = take(&mut found, find_named(&sources, &name, "source"))?;
            Some((name, take(&mut found, to_shards(program, value, entries))?))
        });
        let sources = sources.collect();
        let values = self.values.into_iter().filter_map(|(name, entries)| {
            let missing = || refuse(format!("the program has no value %{name}"));
            let value = take(&mut found, find_value(program, &name).ok_or_else(missing))?;
            Some((value, take(&mut found, to_shards(program, value, entries))?))
        });
        let values = values.collect();
        let named: BTreeMap<&str, ValueId> = list_named(program, Opcode::Output).collect();
        let outputs: Vec<FunctionOutput> = (self.outputs.into_iter())
            .filter_map(|entry| take(&mut found, entry.into_output(program, &named)))
            .collect();
        if !outputs
            .iter()
            .map(|output| output.name.as_str())
            .eq(plain.outputs.iter().map(|o| o.name.as_str()))
        {
            let list = |outputs: &[FunctionOutput]| {
                format!("{:?}", outputs.iter().map(|o| &o.name).collect::<Vec<_>>())
            };
            found.push(
                refuse("the outputs are not those of the program".to_string())
                    .with_label("stated", list(&outputs))
                    .with_label("the program", list(&plain.outputs)),
            );
        }
        found.extend(check_constants(program, &self.constants));
        let dtype = DtypePolicy::from_name(&self.dtype);
        let dtype =
            take(&mut found, dtype.ok_or_else(|| refuse(format!("no precision is called {:?}", self.dtype))));
        let fixed_axes =
            self.fixed_axes.iter().filter_map(|name| take(&mut found, name.parse::<Axis>().map_err(|d| *d)));
        let fixed_axes: BTreeSet<Axis> = fixed_axes.collect();
        if mesh.is_none() && !fixed_axes.is_empty() {
            found.push(refuse("an axis has a fixed size, and no mesh states it".to_string()));
        }
        if self.returns_one && outputs.len() != 1 {
            found.push(refuse(format!("the function returns one array, and has {} outputs", outputs.len())));
        }
        if !found.is_empty() {
            return Err(found);
        }
        Ok(ArrayFunction {
            mesh,
            sources,
            values,
            outputs,
            returns_one: self.returns_one,
            constants: self.constants,
            dtype: dtype.unwrap_or_default(),
            rounding_seed: self.rounding_seed,
            is_deterministic: self.deterministic,
            fixed_axes,
            program: plain.program,
        })
    }
}

impl MeshEntry {
    fn into_mesh(self) -> Result<DeviceMesh, Diagnostic> {
        let axes = self.axes.iter().map(|name| name.parse::<Axis>()).collect::<Result<Vec<_>, _>>();
        let axes = axes.map_err(|d| *d)?;
        if axes.len() != self.sizes.len() || !axes.is_sorted_by(|a, b| a < b) {
            let what = format!("the mesh has the axes {:?} and the sizes {:?}", self.axes, self.sizes);
            return Err(refuse(what).with_hint("list each axis once, in nesting order, with one size"));
        }
        let mut sizes = [1; Axis::ALL.len()];
        axes.iter().zip(&self.sizes).for_each(|(axis, size)| sizes[*axis as usize] = *size);
        let mesh = DeviceMesh { axes, mesh: Mesh::new(sizes).map_err(|d| *d)?, devices: self.devices };
        mesh.rank_map().map_err(|d| *d)?;
        Ok(mesh)
    }
}

impl OutputEntry {
    fn into_output(
        self,
        program: &Program,
        named: &BTreeMap<&str, ValueId>,
    ) -> Result<FunctionOutput, Diagnostic> {
        let value = find_named(named, &self.name, "output")?;
        let count = program.type_of(value).shape.len();
        let dims = self.dims.iter().map(|name| name.parse::<DimName>()).collect::<Result<Vec<_>, _>>();
        let dims = dims.map_err(|d| *d)?;
        if !(dims.is_empty() || dims.len() == count) || self.units.len() != count || self.units.contains(&0) {
            return Err(refuse(format!("output `{}` has {count} dims", self.name))
                .with_label("stated", format!("dims {:?}, units {:?}", self.dims, self.units)));
        }
        let shards = self.shards.map(|entries| to_shards(program, value, entries)).transpose()?;
        Ok(FunctionOutput { name: self.name, dims, units: self.units, shards })
    }
}

/// Returns the shards of a value, with every dim among those of its type and with one axis for a dim.
fn to_shards(program: &Program, value: ValueId, entries: Vec<ShardEntry>) -> Result<DimShards, Diagnostic> {
    let (count, name) = (program.type_of(value).shape.len(), &program.value(value).name);
    let mut pairs: Vec<(Axis, DimShard)> = Vec::new();
    for ShardEntry { axis, dim, unit } in entries {
        let axis: Axis = axis.parse().map_err(|d: Box<Diagnostic>| *d)?;
        if dim >= count || unit == 0 {
            return Err(refuse(format!(
                "%{name} of {count} dims cannot be sharded in its dim {dim} in units of {unit}"
            )));
        }
        if let Some((other, _)) = pairs.iter().find(|(other, shard)| *other == axis || shard.dim == dim) {
            return Err(refuse(format!(
                "%{name} is sharded over both {other} and {axis} in one dim, or twice over one"
            )));
        }
        pairs.push((axis, DimShard { dim, unit }));
    }
    Ok(DimShards::from_pairs(pairs))
}

/// Checks that the constants are the call scalars of the program, each with all its numbers.
fn check_constants(program: &Program, constants: &BTreeMap<String, Vec<f32>>) -> Diagnostics {
    let scalars: BTreeMap<&str, u64> = list_named(program, Opcode::Call)
        .map(|(name, value)| (name, program.type_of(value).shape.iter().product()))
        .collect();
    let stated: BTreeMap<&str, u64> =
        constants.iter().map(|(name, values)| (name.as_str(), values.len() as u64)).collect();
    if scalars == stated {
        return Vec::new();
    }
    vec![
        refuse("the constants are not the call scalars of the program".to_string())
            .with_label("stated", format!("{stated:?}, as names and numbers of elements"))
            .with_label("the program", format!("{scalars:?}")),
    ]
}

fn find_named(named: &BTreeMap<&str, ValueId>, name: &str, kind: &str) -> Result<ValueId, Diagnostic> {
    named.get(name).copied().ok_or_else(|| {
        let d = refuse(format!("the program has no {kind} \"{name}\""));
        match closest_name(name, named.keys().copied()) {
            Some(near) => d.with_hint(format!("did you mean \"{near}\"?")),
            None => d,
        }
    })
}

fn refuse(message: String) -> Diagnostic {
    Diagnostic::error(&T0096, message)
}

/// Returns the value, or notes the error beside the others of the file.
fn take<T>(found: &mut Diagnostics, result: Result<T, Diagnostic>) -> Option<T> {
    result.map_err(|d| found.push(d)).ok()
}
