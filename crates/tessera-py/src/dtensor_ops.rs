//! The methods of `tessera.dist.DTensor` that run a program.

use pyo3::prelude::*;
use tessera_ir::Opcode;

use crate::dtensor::{DTensor, to_layout};
use crate::eager::redistribute;
use crate::layers::apply_binary;
use crate::mesh::Spec;

#[pymethods]
impl DTensor {
    /// Returns this tensor in another layout. The ranks exchange shards by a planned and verified program.
    fn redistribute(&self, py: Python<'_>, spec: Spec) -> PyResult<DTensor> {
        let layout = to_layout(py, &spec, (self.values.shape(), &self.dims, &self.units), &self.mesh)?;
        redistribute(py, self, layout)
    }

    fn __add__(&self, py: Python<'_>, other: Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        apply_binary(py, Opcode::Add, self.clone().into(), other)
    }

    fn __mul__(&self, py: Python<'_>, other: Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        apply_binary(py, Opcode::Mul, self.clone().into(), other)
    }
}
