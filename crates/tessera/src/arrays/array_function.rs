//! Functions of arrays before they are planned: a logical program, how its arrays are sharded by the axes of whatever mesh
//! runs it, and what calls do not change.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::{Bundle, Dialect, Opcode, Program, ValueId, parse};
use tessera_mesh::{Axis, DimName, DimShards, Mesh, MeshError, RankMap};
use tessera_plan::layouts::{LaidOutProgram, StreamOverlap, lower_by_layouts, lower_mesh_invariant};
use tessera_plan::precision::apply_dtype_policy_to_arrays;
use tessera_plan::{DtypePolicy, round_stochastically};

use crate::codes::{T0096, T0097};

/// A function of arrays as a logical program.
#[derive(Debug, Clone)]
pub struct ArrayFunction {
    /// The program, with global shapes.
    pub program: Arc<Program>,
    /// The mesh over which its arrays were distributed.
    pub mesh: Option<DeviceMesh>,
    /// How inputs and weights are sharded, by name; a source without an entry is replicated.
    pub sources: BTreeMap<String, DimShards>,
    /// How values are sharded where ops read them, if a layer states it.
    pub values: BTreeMap<ValueId, DimShards>,
    /// The outputs in the order in which the function returns them.
    pub outputs: Vec<FunctionOutput>,
    /// Whether the function returns one array, and no tuple.
    pub returns_one: bool,
    /// The call scalars, which are equal in every call, by name.
    pub constants: BTreeMap<String, Vec<f32>>,
    /// The precision in which matmuls read their operands.
    pub dtype: DtypePolicy,
    /// The seed with which values are rounded stochastically where they become bf16 or e4m3, if they are.
    pub rounding_seed: Option<u64>,
    /// Whether no bit of the results may depend on the mesh.
    pub is_deterministic: bool,
    /// Axes whose sizes the program contains as numbers, so that it runs only on meshes with those sizes.
    pub fixed_axes: BTreeSet<Axis>,
}

/// An output of a function.
#[derive(Debug, Clone, PartialEq)]
pub struct FunctionOutput {
    /// Name in the program.
    pub name: String,
    /// Names of the dims; none if they have no names.
    pub dims: Vec<DimName>,
    /// Units in which the dims are sharded.
    pub units: Vec<u64>,
    /// How the output leaves; `None` if it leaves as its op made it.
    pub shards: Option<DimShards>,
}

/// A mesh with the axes that a user named, and a device for every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceMesh {
    /// The named axes, in nesting order.
    pub axes: Vec<Axis>,
    /// The sizes of all axes.
    pub mesh: Mesh,
    /// Names of the devices, in rank order.
    pub devices: Vec<String>,
}

impl DeviceMesh {
    /// Returns the devices of the ranks.
    ///
    /// # Errors
    /// T0103 for another number of devices than ranks, or a repeated one.
    pub fn rank_map(&self) -> Result<RankMap, MeshError> {
        RankMap::new(&self.mesh, self.devices.clone())
    }
}

/// Lowers functions for the ranks of a mesh. If one of them is deterministic, all are: they share the kernels of one plan.
///
/// # Errors
/// As [`ArrayFunction::lay_out`] and [`lower_by_layouts`].
pub fn lower_functions<'a>(
    functions: impl IntoIterator<Item = &'a ArrayFunction> + Clone,
    mesh: &Mesh,
    rank_map: RankMap,
    overlap: &StreamOverlap,
) -> Result<Bundle, Diagnostics> {
    let laid_out = functions.clone().into_iter().map(|function| function.lay_out(mesh));
    let laid_out: Vec<LaidOutProgram> = laid_out.collect::<Result<_, _>>()?;
    match functions.into_iter().any(|function| function.is_deterministic) {
        true => lower_mesh_invariant(&laid_out, mesh, rank_map, overlap),
        false => lower_by_layouts(&laid_out, mesh, rank_map, overlap),
    }
}

impl ArrayFunction {
    /// Wraps a program whose arrays are replicated. Outputs leave as their ops make them.
    ///
    /// # Errors
    /// T0096 for a program of a role, or one without outputs.
    pub fn new(program: Program) -> Result<ArrayFunction, Diagnostic> {
        let refuse = |message: String| {
            Err(Diagnostic::error(&T0096, message).with_label(format!("@{}", program.name), "this program"))
        };
        if program.dialect != Dialect::Logical {
            return refuse(format!("the program is that of role {}, and no logical one", program.role));
        }
        let outputs: Vec<FunctionOutput> = list_named(&program, Opcode::Output)
            .map(|(name, value)| {
                let count = program.type_of(value).shape.len();
                let dims = DimName::of_weight(count).unwrap_or_default();
                FunctionOutput { name: name.to_string(), dims, units: vec![1; count], shards: None }
            })
            .collect();
        if outputs.is_empty() {
            return refuse("the program returns nothing".to_string());
        }
        Ok(ArrayFunction {
            returns_one: outputs.len() == 1,
            program: Arc::new(program),
            mesh: None,
            sources: BTreeMap::new(),
            values: BTreeMap::new(),
            outputs,
            constants: BTreeMap::new(),
            dtype: DtypePolicy::F32,
            rounding_seed: None,
            is_deterministic: false,
            fixed_axes: BTreeSet::new(),
        })
    }

    /// Parses the text of a logical program. `file` names the text in diagnostics.
    ///
    /// # Errors
    /// As [`ArrayFunction::new`], and those of [`parse`] with their places in the text.
    pub fn from_text(text: &str, file: &str) -> Result<ArrayFunction, Diagnostics> {
        ArrayFunction::new(parse(text, file)?).map_err(|d| vec![d.with_label(file, "this text")])
    }

    /// Returns the names and whole shapes of the inputs, in the order of the function's parameters.
    #[must_use]
    pub fn inputs(&self) -> Vec<(String, Vec<u64>)> {
        self.list_shapes(Opcode::Input)
    }

    /// Returns the names and whole shapes of the weights, in program order.
    #[must_use]
    pub fn weights(&self) -> Vec<(String, Vec<u64>)> {
        self.list_shapes(Opcode::Weight)
    }

    /// Returns the axes that shard an array of the function.
    #[must_use]
    pub fn sharded_axes(&self) -> BTreeSet<Axis> {
        let outputs = self.outputs.iter().filter_map(|output| output.shards.as_ref());
        let shards = self.sources.values().chain(self.values.values()).chain(outputs);
        shards.flat_map(|shards| shards.iter().map(|(axis, _)| axis)).collect()
    }

    /// Returns the program as the planner takes it for a mesh: with its layouts there, and with the casts of its precision.
    ///
    /// # Errors
    /// T0097 if the program contains another size of an axis, T0107 for every array that the mesh cannot share, or what
    /// the precision refuses.
    pub fn lay_out(&self, mesh: &Mesh) -> Result<LaidOutProgram, Diagnostics> {
        let mut found: Diagnostics = self.find_fixed_axis(mesh).into_iter().collect();
        let mut place = |what: String, shards: &DimShards, value: ValueId| {
            let layout = shards.to_layout(&self.program.type_of(value).shape, mesh);
            layout.map_err(|d| found.push(d.with_label(what, format!("of @{}", self.program.name)))).ok()
        };
        let mut sources = BTreeMap::new();
        for opcode in [Opcode::Input, Opcode::Weight] {
            for (name, value) in list_named(&self.program, opcode) {
                let Some(shards) = self.sources.get(name) else { continue };
                sources
                    .extend(place(format!("source `{name}`"), shards, value).map(|l| (name.to_string(), l)));
            }
        }
        let mut outputs = BTreeMap::new();
        for output in &self.outputs {
            let Some(shards) = &output.shards else { continue };
            let named = list_named(&self.program, Opcode::Output).find(|(name, _)| *name == output.name);
            let layout =
                named.and_then(|(_, value)| place(format!("output `{}`", output.name), shards, value));
            outputs.extend(layout.map(|l| (output.name.clone(), l)));
        }
        let mut stated = Vec::new();
        for (id, shards) in &self.values {
            let layout = place(format!("value %{}", self.program.value(*id).name), shards, *id);
            stated.extend(layout.map(|l| (*id, l)));
        }
        if !found.is_empty() {
            return Err(found);
        }
        let mut program = apply_dtype_policy_to_arrays(&self.program, self.dtype)?;
        if let Some(seed) = self.rounding_seed {
            round_stochastically(&mut program, seed);
        }
        // Casts give values other numbers, and their names stay.
        let renumber = |id: ValueId| find_value(&program, &self.program.value(id).name);
        let values = stated.into_iter().filter_map(|(id, layout)| Some((renumber(id)?, layout))).collect();
        Ok(LaidOutProgram { sources, values, outputs, program })
    }

    /// Returns why the program does not run on a mesh whose axes have other sizes than its own.
    fn find_fixed_axis(&self, mesh: &Mesh) -> Option<Diagnostic> {
        let traced = self.mesh.as_ref()?.mesh;
        let differs = |axis: &&Axis| mesh.axis_size(**axis) != traced.axis_size(**axis);
        let axis = *self.fixed_axes.iter().find(differs)?;
        let name = &self.program.name;
        Some(
            Diagnostic::error(&T0097, format!("`{name}` contains the size of {axis} as a number"))
                .with_label("the program", format!("{axis}={}", traced.axis_size(axis)))
                .with_label("the mesh", format!("{axis}={}", mesh.axis_size(axis)))
                .with_hint("trace the function again over a mesh of this size"),
        )
    }

    fn list_shapes(&self, opcode: Opcode) -> Vec<(String, Vec<u64>)> {
        let named = list_named(&self.program, opcode);
        named.map(|(name, value)| (name.to_string(), self.program.type_of(value).shape.clone())).collect()
    }
}

/// Returns the names and values of the ops of a kind: what sources define, and what outputs take.
pub(super) fn list_named(program: &Program, opcode: Opcode) -> impl Iterator<Item = (&str, ValueId)> {
    let ops = program.ops.iter().filter(move |op| op.opcode == opcode);
    ops.filter_map(|op| Some((op.name.as_deref()?, *op.results.first().or(op.operands.first())?)))
}

/// Finds a value by its name.
pub(super) fn find_value(program: &Program, name: &str) -> Option<ValueId> {
    program.values.iter().position(|value| value.name == name).map(|at| ValueId(at as u32))
}
