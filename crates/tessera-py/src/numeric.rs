//! `tessera.op.numeric`: the precision of a layer.

use pyo3::prelude::*;
use tessera_base::Diagnostic;
use tessera_cli::codes::T1505;
use tessera_plan::DtypePolicy;

use crate::errors::raise_one;

/// Names of the dtypes, and the policy of a plan that each is.
const DTYPES: [(&str, DtypePolicy); 3] =
    [("f32", DtypePolicy::F32), ("bf16", DtypePolicy::Bf16), ("fp8_e4m3", DtypePolicy::Fp8)];

/// The precision of a program, as its layers state it.
#[pyclass(frozen, from_py_object, module = "tessera.op", eq)]
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Numeric {
    dtype: &'static str,
    policy: DtypePolicy,
    deterministic: bool,
    scale: Option<String>,
    /// The seed of stochastic rounding; `None` rounds to nearest.
    rounding_seed: Option<u64>,
}

/// Largest seed that a program can state.
pub(crate) const MAX_SEED: u64 = 1 << 40;

/// Creates a precision policy.
#[pyfunction]
#[pyo3(signature = (dtype="f32", accum="f32", *, deterministic=false, scale=None, stochastic_round=false, seed=None))]
#[allow(clippy::too_many_arguments, reason = "they are the keywords of the guide")]
pub(crate) fn numeric(
    py: Python<'_>,
    dtype: &str,
    accum: &str,
    deterministic: bool,
    scale: Option<String>,
    stochastic_round: bool,
    seed: Option<u64>,
) -> PyResult<Numeric> {
    let refuse =
        |message: String, hint: &str| Err(raise_one(py, Diagnostic::error(&T1505, message).with_hint(hint)));
    let Some((dtype, policy)) = DTYPES.into_iter().find(|(name, _)| *name == dtype) else {
        return refuse(format!("dtype {dtype:?} is no dtype of a policy"), "use f32, bf16 or fp8_e4m3");
    };
    if accum != "f32" {
        return refuse(format!("accum = {accum:?}, but matmuls add in f32"), "state accum=\"f32\"");
    }
    if scale.as_deref().is_some_and(|scale| scale != "per_channel") {
        return refuse(
            format!("scale = {:?} is not known", scale.unwrap_or_default()),
            "e4m3 has one scale per row of a matrix: state scale=\"per_channel\" or none",
        );
    }
    if scale.is_some() && policy != DtypePolicy::Fp8 {
        return refuse(format!("a scale for {dtype}, whose values have none"), "state it with fp8_e4m3");
    }
    if stochastic_round && policy == DtypePolicy::F32 {
        return refuse(
            "stochastic rounding of f32, whose values nothing converts".into(),
            "state dtype=\"bf16\" or dtype=\"fp8_e4m3\"",
        );
    }
    if seed.is_some() && !stochastic_round {
        return refuse(
            "a seed without stochastic rounding, which alone draws numbers".into(),
            "state stochastic_round=True",
        );
    }
    if let Some(seed) = seed.filter(|seed| *seed > MAX_SEED) {
        return refuse(format!("seed = {seed} is above 2^40"), "choose a smaller seed");
    }
    let rounding_seed = stochastic_round.then(|| seed.unwrap_or(0));
    Ok(Numeric { dtype, policy, deterministic, scale, rounding_seed })
}

#[pymethods]
impl Numeric {
    /// Name of the dtype in which matmuls read their operands.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype
    }

    /// Name of the dtype in which they add.
    #[getter]
    fn accum(&self) -> &'static str {
        "f32"
    }

    /// Whether no bit of a result may depend on the mesh.
    #[getter]
    fn deterministic(&self) -> bool {
        self.deterministic
    }

    /// What has a scale of its own: `"per_channel"` or `None`.
    #[getter]
    fn scale(&self) -> Option<&str> {
        self.scale.as_deref()
    }

    /// Whether values are rounded stochastically where they become bf16 or e4m3.
    #[getter]
    fn stochastic_round(&self) -> bool {
        self.rounding_seed.is_some()
    }

    /// The seed of stochastic rounding, or `None`.
    #[getter]
    fn seed(&self) -> Option<u64> {
        self.rounding_seed
    }

    fn __repr__(&self) -> String {
        let rounding = self
            .rounding_seed
            .map_or_else(String::new, |seed| format!(", stochastic_round=True, seed={seed}"));
        let deterministic = if self.deterministic { "True" } else { "False" };
        format!("numeric(dtype={:?}, accum=\"f32\", deterministic={deterministic}{rounding})", self.dtype)
    }
}

impl Numeric {
    /// Returns whether no bit of a result may depend on the mesh.
    pub(crate) fn is_deterministic(&self) -> bool {
        self.deterministic
    }

    /// Returns the policy of a plan.
    pub(crate) fn policy(&self) -> DtypePolicy {
        self.policy
    }

    /// Returns the seed of stochastic rounding; `None` rounds to nearest.
    pub(crate) fn rounding_seed(&self) -> Option<u64> {
        self.rounding_seed
    }

    /// Returns the dtype and the rounding in words.
    pub(crate) fn describe(&self) -> String {
        match self.rounding_seed {
            None => self.dtype.to_string(),
            Some(seed) => format!("{}, rounded stochastically with seed {seed}", self.dtype),
        }
    }
}
