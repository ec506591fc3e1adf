//! Planning by estimate: the recipes of the mapping guide, the models of the zoo, machines, and the guide's memory
//! arithmetic.

use std::collections::BTreeMap;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tessera_base::Diagnostic;
use tessera_cli::codes::T1508;
use tessera_estimate::{
    DEFAULT_RACK, LanguageQuery, ModelSource, Objective, Pins, explain_language, load_machine,
    load_thresholds, search_language,
};
use tessera_mesh::{Axis, Cluster};
use tessera_plan::search::memory_table::{MemoryPlanInputs, plan_memory as compute_table};
use tessera_plan::search::recipe::require_recipe;

use crate::errors::OrRaise;
use crate::mesh::Mesh;

/// The guide's name of a rack, for which the catalog has one entry per generation.
const RACK_OF_THE_GUIDE: &str = "nvl72";

/// A question about the mappings of a model on a machine.
#[pyclass(frozen, module = "tessera.graph")]
pub(crate) struct Search {
    query: LanguageQuery,
    /// The mesh that the question states, if it is a recipe.
    mesh: Option<Mesh>,
    about: String,
}

/// Returns a recipe of the mapping guide: its model, its work and its mesh on a rack.
#[pyfunction]
#[pyo3(signature = (name, *, cluster=None))]
pub(crate) fn recipe(py: Python<'_>, name: &str, cluster: Option<&str>) -> PyResult<Search> {
    let recipe = require_recipe(name).or_raise(py)?;
    let [tp, ep, pp, dp] = recipe.axes;
    let axes = Axis::ALL.map(|axis| axis.name().to_string());
    let sizes: BTreeMap<String, u32> = axes.iter().cloned().zip([tp, ep, pp, dp]).collect();
    let devices = (0..tp * ep * pp * dp).map(|i| format!("GPU{i}")).collect();
    let mesh = Mesh::from_axes(py, axes.to_vec(), sizes, Some(devices))?;
    let source = ModelSource::Recipe(recipe.name.to_string());
    let query = build_query(py, source, cluster.unwrap_or(recipe.cluster), None, "")?;
    let about =
        format!("{}\nguide: {}\nchosen here: {}", recipe.title, recipe.guide_text, recipe.our_choices);
    Ok(Search { query, mesh: Some(mesh), about })
}

/// Returns the question how to map a model of the zoo, or of a config.json, onto a machine.
#[pyfunction]
#[pyo3(signature = (model, *, cluster=DEFAULT_RACK, objective="throughput", devices=None, **pins))]
pub(crate) fn search(
    py: Python<'_>,
    model: &str,
    cluster: &str,
    objective: &str,
    devices: Option<u32>,
    pins: Option<&Bound<'_, PyDict>>,
) -> PyResult<Search> {
    let source = match model.ends_with(".json") {
        true => ModelSource::Config(model.into()),
        false => ModelSource::Zoo(model.to_string()),
    };
    let objective = parse_objective(objective).or_raise(py)?;
    let query = build_query(py, source, cluster, devices, &pins_to_text(pins)?)?;
    let about = format!("{model} on {cluster}");
    Ok(Search { query: LanguageQuery { objective: Some(objective), ..query }, mesh: None, about })
}

/// Parses what a search optimises.
///
/// # Errors
/// T1508.
pub(crate) fn parse_objective(name: &str) -> Result<Objective, Diagnostic> {
    match name {
        "throughput" => Ok(Objective::Throughput),
        "latency" => Ok(Objective::Latency),
        "memory" => Ok(Objective::Memory),
        _ => Err(Diagnostic::error(&T1508, format!("no objective is called {name:?}"))
            .with_hint("use \"throughput\", \"latency\" or \"memory\"")),
    }
}

fn build_query(
    py: Python<'_>,
    model_source: ModelSource,
    cluster: &str,
    devices: Option<u32>,
    pins: &str,
) -> PyResult<LanguageQuery> {
    Ok(LanguageQuery {
        model_source,
        machine: load_machine(name_in_catalog(cluster), None, devices).or_raise(py)?,
        devices,
        job: None,
        objective: None,
        pins: Pins::parse(pins).or_raise(py)?,
        routing: None,
        prefetch_hit_rate: None,
        strict: false,
        limits: load_thresholds(None).or_raise(py)?,
        command: "tessera.graph".into(),
    })
}

/// Writes pins, such as `tp=12, ep=6`, as the command line takes them.
fn pins_to_text(pins: Option<&Bound<'_, PyDict>>) -> PyResult<String> {
    let pairs = pins.into_iter().flatten().map(|(name, value)| Ok(format!("{name}={}", value.str()?)));
    Ok(pairs.collect::<PyResult<Vec<_>>>()?.join(","))
}

#[pymethods]
impl Search {
    /// The mesh of a recipe, with a device for every rank; `None` for a question without one.
    #[getter]
    fn mesh(&self) -> Option<Mesh> {
        self.mesh.clone()
    }

    /// Searches the mappings and returns the report, as text.
    fn report(&self, py: Python<'_>) -> PyResult<String> {
        Ok(py.detach(|| search_language(&self.query)).or_raise(py)?.to_text())
    }

    /// Searches the mappings and returns the report, as a page for a browser.
    fn html(&self, py: Python<'_>) -> PyResult<String> {
        Ok(py.detach(|| search_language(&self.query)).or_raise(py)?.to_html())
    }

    /// Searches the mappings and returns the report as the text of a JSON object.
    fn json(&self, py: Python<'_>) -> PyResult<String> {
        Ok(py.detach(|| search_language(&self.query)).or_raise(py)?.json.to_string())
    }

    /// Says how good one mapping is, or why it is refused: `why(tp=12, ep=6)`.
    #[pyo3(signature = (**pins))]
    fn why(&self, py: Python<'_>, pins: Option<&Bound<'_, PyDict>>) -> PyResult<String> {
        let pins = Pins::parse(&pins_to_text(pins)?).or_raise(py)?;
        Ok(py.detach(|| explain_language(&self.query, &pins)).or_raise(py)?.1)
    }

    fn __str__(&self) -> String {
        self.about.clone()
    }

    fn __repr__(&self) -> String {
        format!("Search({:?})", self.about.lines().next().unwrap_or_default())
    }
}

/// A machine of the catalog: how many devices it has, and how they are linked.
#[pyclass(frozen, module = "tessera.graph")]
pub(crate) struct Topology {
    cluster: Cluster,
}

/// Returns a machine of the catalog, or of a cluster.toml.
#[pyfunction]
pub(crate) fn topology(py: Python<'_>, name: &str) -> PyResult<Topology> {
    let machine = load_machine(name_in_catalog(name), None, None).or_raise(py)?;
    Ok(Topology { cluster: machine.cluster })
}

/// Returns the name of a cluster in the catalog: the guide calls its rack by one word.
pub(crate) fn name_in_catalog(name: &str) -> &str {
    if name == RACK_OF_THE_GUIDE { DEFAULT_RACK } else { name }
}

#[pymethods]
impl Topology {
    /// Name in the catalog.
    #[getter]
    fn name(&self) -> &str {
        &self.cluster.name
    }

    /// Number of devices.
    #[getter]
    fn devices(&self) -> u32 {
        self.cluster.device_count()
    }

    /// Number of devices that one switch fabric connects at full bandwidth.
    #[getter]
    fn domain_size(&self) -> u32 {
        self.cluster.domain_size
    }

    /// Bytes of memory of a device.
    #[getter]
    fn memory_bytes(&self) -> f64 {
        self.cluster.device.memory_bytes.value
    }

    /// Bytes per second of a device's memory.
    #[getter]
    fn memory_bytes_per_second(&self) -> f64 {
        self.cluster.device.memory_bytes_per_s.value
    }

    /// Bytes per second of a device's links, in one direction: within a domain, within a rack and between racks.
    #[getter]
    fn link_bytes_per_second(&self) -> Vec<f64> {
        self.cluster.links.iter().map(|link| link.bytes_per_s.value).collect()
    }

    fn __repr__(&self) -> String {
        format!("Topology({}, {} devices)", self.cluster.title, self.cluster.device_count())
    }
}

/// A row of the memory table: its name, its formula with units, its bytes, and its share of the device's memory.
type MemoryRow = (String, String, u64, f64);

/// Returns the memory of one rank as a table, by the guide's arithmetic. A and K are bytes per token and layer.
#[pyfunction]
#[pyo3(signature = (P, A, K, E, H, *, tokens, cached_tokens=None, layers=1, bytes_per_parameter=2.0, expert_parameters=0.0, tp=1, ep=1))]
#[allow(non_snake_case, clippy::too_many_arguments, reason = "they are the letters of the guide")]
pub(crate) fn plan_memory(
    P: f64,
    A: f64,
    K: f64,
    E: u64,
    H: f64,
    tokens: f64,
    cached_tokens: Option<f64>,
    layers: u64,
    bytes_per_parameter: f64,
    expert_parameters: f64,
    tp: u32,
    ep: u32,
) -> PyResult<Vec<MemoryRow>> {
    let numbers =
        [P, A, K, H, tokens, cached_tokens.unwrap_or(tokens), bytes_per_parameter, expert_parameters];
    if tp == 0 || ep == 0 || numbers.iter().any(|n| !n.is_finite() || *n < 0.0) {
        return Err(PyValueError::new_err("sizes are numbers of at least 0, and tp and ep of at least 1"));
    }
    let rows = compute_table(&MemoryPlanInputs {
        parameters: P,
        bytes_per_parameter,
        layers,
        activation_bytes: A,
        cache_bytes: K,
        experts: E,
        expert_parameters,
        device_bytes: H,
        tokens,
        cached_tokens: cached_tokens.unwrap_or(tokens),
        tp,
        ep,
    });
    Ok(rows.into_iter().map(|row| (row.term.to_string(), row.formula, row.bytes.0, row.share)).collect())
}
