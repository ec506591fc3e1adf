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
}

/// Creates a precision policy.
#[pyfunction]
#[pyo3(signature = (dtype="f32", accum="f32", *, deterministic=true, scale=None, stochastic_round=false))]
pub(crate) fn numeric(
    py: Python<'_>,
    dtype: &str,
    accum: &str,
    deterministic: bool,
    scale: Option<String>,
    stochastic_round: bool,
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
    if stochastic_round {
        return refuse(
            "stochastic rounding exists in no backend yet: quantize rounds to nearest, ties to even".into(),
            "leave stochastic_round out",
        );
    }
    Ok(Numeric { dtype, policy, deterministic, scale })
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

    /// Whether ranks must add partial sums in the order of their numbers, which they do in any case.
    #[getter]
    fn deterministic(&self) -> bool {
        self.deterministic
    }

    /// What has a scale of its own: `"per_channel"` or `None`.
    #[getter]
    fn scale(&self) -> Option<&str> {
        self.scale.as_deref()
    }

    fn __repr__(&self) -> String {
        format!("numeric(dtype={:?}, accum=\"f32\", deterministic={})", self.dtype, self.deterministic)
    }
}

impl Numeric {
    /// Returns the name of the dtype.
    pub(crate) fn name(&self) -> &'static str {
        self.dtype
    }

    /// Returns the policy of a plan.
    pub(crate) fn policy(&self) -> DtypePolicy {
        self.policy
    }
}
