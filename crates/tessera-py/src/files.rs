//! Functions and plans that come from files and go to files.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use tessera::arrays::{
    ArrayFunction, ArrayPlan, CopyRule, HostArray, check_weight_shapes, read_weights_file,
};
use tessera::codes::T0091;
use tessera_base::{Diagnostic, Diagnostics};

use crate::array_memory::take_array;
use crate::dtensor::DTensor;
use crate::errors::{OrRaise, raise_one};
use crate::mesh::Mesh;
use crate::plan::Plan;
use crate::program::{Graph, to_shards};
use crate::trace::ArraySpec;

/// The name of a text in diagnostics that came from no file.
const TEXT_NAME: &str = "text";

/// Parses the text of a logical program. `inputs` and `weights` say how arrays are sharded; others are replicated.
#[pyfunction]
#[pyo3(signature = (text, mesh=None, *, inputs=BTreeMap::new(), weights=BTreeMap::new()))]
pub(crate) fn parse(
    py: Python<'_>,
    text: &str,
    mesh: Option<Mesh>,
    inputs: BTreeMap<String, ArraySpec>,
    weights: BTreeMap<String, DTensor>,
) -> PyResult<Graph> {
    let mut function = ArrayFunction::from_text(text, TEXT_NAME).or_raise(py)?;
    let arrays = (weights.iter())
        .map(|(name, array)| Ok((name.clone(), array.host_array("weights of a program")?.clone())))
        .collect::<Result<BTreeMap<String, HostArray>, Diagnostic>>()
        .map_err(|d| raise_one(py, d))?;
    if !arrays.is_empty() {
        check_weight_shapes(&function.weights(), &arrays).or_raise(py)?;
    }
    let known = function.inputs();
    let specs = weights.iter().map(|(name, array)| (name, ArraySpec::from(array)));
    for (name, spec) in inputs.iter().map(|(name, spec)| (name, spec.clone())) {
        check_input(name, &spec, &known).or_raise(py)?;
    }
    let mut found = mesh;
    for (name, spec) in inputs.iter().map(|(name, spec)| (name, spec.clone())).chain(specs) {
        if let Some(theirs) = &spec.mesh {
            let ours = found.get_or_insert_with(|| theirs.clone());
            if !ours.is_same(theirs) {
                let d = Diagnostic::error(&T0091, format!("`{name}` lies on another mesh"))
                    .with_label("the mesh", ours.describe())
                    .with_label(name.clone(), theirs.describe());
                return Err(raise_one(py, d.with_hint("distribute all arrays over one mesh")));
            }
        }
        function.sources.insert(name.clone(), to_shards(name, &spec.layout, &spec.units).or_raise(py)?);
    }
    function.mesh = found.map(|mesh| mesh.to_device_mesh());
    Ok(Graph { function: Arc::new(function), weights: arrays })
}

/// Reads a function that `Graph.save` wrote. Arrays in `weights` take the place of those of the folder.
#[pyfunction]
#[pyo3(signature = (folder, *, weights=None))]
pub(crate) fn load(
    py: Python<'_>,
    folder: PathBuf,
    weights: Option<BTreeMap<String, Bound<'_, PyAny>>>,
) -> PyResult<Graph> {
    let (function, mut arrays) = py.detach(|| ArrayFunction::read(&folder)).or_raise(py)?;
    if let Some(given) = weights {
        arrays.extend(take_arrays(given)?);
        check_weight_shapes(&function.weights(), &arrays).or_raise(py)?;
    }
    Ok(Graph { function: Arc::new(function), weights: arrays })
}

/// The weights of a plan: arrays by name, or a file that holds them.
#[derive(FromPyObject)]
pub(crate) enum WeightsSource<'py> {
    Arrays(BTreeMap<String, Bound<'py, PyAny>>),
    File(PathBuf),
}

/// Reads a plan folder and proves it again.
#[pyfunction]
#[pyo3(signature = (folder, *, weights=None))]
pub(crate) fn load_plan(
    py: Python<'_>,
    folder: PathBuf,
    weights: Option<WeightsSource<'_>>,
) -> PyResult<Plan> {
    let plan = py.detach(|| ArrayPlan::read(&folder)).or_raise(py)?;
    let shapes: Vec<(String, Vec<u64>)> =
        plan.weights().map(|(name, shape)| (name.to_string(), shape.to_vec())).collect();
    let arrays = match weights {
        None => BTreeMap::new(),
        Some(WeightsSource::File(path)) => {
            py.detach(|| read_weights_file(&path, shapes.iter().cloned())).or_raise(py)?
        }
        Some(WeightsSource::Arrays(given)) => {
            let arrays = take_arrays(given)?;
            check_weight_shapes(&shapes, &arrays).or_raise(py)?;
            arrays
        }
    };
    Ok(Plan::from_sealed(Arc::new(plan), arrays))
}

fn take_arrays(given: BTreeMap<String, Bound<'_, PyAny>>) -> PyResult<BTreeMap<String, HostArray>> {
    let arrays = given.into_iter().map(|(name, value)| {
        let array = match value.extract::<DTensor>() {
            Ok(array) => {
                array.host_array("weights of a program").map_err(|d| raise_one(value.py(), d))?.clone()
            }
            Err(_) => take_array(&value, CopyRule::IfNeeded)?,
        };
        Ok((name, array))
    });
    arrays.collect()
}

/// Checks that a spec is that of an input of the program.
///
/// # Errors
/// T0091.
fn check_input(name: &str, spec: &ArraySpec, known: &[(String, Vec<u64>)]) -> Result<(), Diagnostics> {
    match known.iter().find(|(input, _)| input == name) {
        Some((_, shape)) if *shape == spec.shape => Ok(()),
        found => {
            let what = match found {
                None => format!("the program has no input `{name}`"),
                Some((_, shape)) => format!("the input `{name}` has the shape {shape:?}"),
            };
            Err(vec![
                Diagnostic::error(&T0091, what).with_label(name.to_string(), format!("{:?}", spec.shape)),
            ])
        }
    }
}
