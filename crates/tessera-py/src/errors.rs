//! Diagnostics as exceptions: `tessera.TesseraError` with a code, places, notes and a hint.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tessera_base::{Diagnostic, DiagnosticFormat, Diagnostics, render_all};

/// Turns the problems of a request into one exception; it names the first, and lists the others as `more`.
pub(crate) fn raise(py: Python<'_>, diagnostics: Diagnostics) -> PyErr {
    to_exception(py, &diagnostics).map_or_else(|e| e, PyErr::from_value)
}

/// Turns a diagnostic into an exception.
pub(crate) fn raise_one(py: Python<'_>, diagnostic: Diagnostic) -> PyErr {
    raise(py, vec![diagnostic])
}

/// The outcome of a request whose problems become an exception.
pub(crate) trait OrRaise<T> {
    /// Returns the value, or raises the diagnostics.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for Result<T, Diagnostics> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|ds| raise(py, ds))
    }
}

impl<T> OrRaise<T> for Result<T, Diagnostic> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|d| raise_one(py, d))
    }
}

impl<T> OrRaise<T> for Result<T, Box<Diagnostic>> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|d| raise_one(py, *d))
    }
}

fn to_exception<'py>(py: Python<'py>, diagnostics: &[Diagnostic]) -> PyResult<Bound<'py, PyAny>> {
    let class = py.import("tessera.errors")?.getattr("TesseraError")?;
    let Some((first, others)) = diagnostics.split_first() else {
        return class.call1(("T0087", "the request failed without a diagnostic"));
    };
    let places: Vec<(&str, &str)> =
        first.labels.iter().map(|label| (label.location.as_str(), label.message.as_str())).collect();
    let more = others.iter().map(|d| to_exception(py, std::slice::from_ref(d)));
    let more = PyTuple::new(py, more.collect::<PyResult<Vec<_>>>()?)?;
    let text = render_all(diagnostics, DiagnosticFormat::Text, &|_| None);
    class.call1((
        first.code.id,
        &first.message,
        places,
        first.notes.clone(),
        &first.hint,
        text.trim_end(),
        more,
    ))
}
