//! `tessera.graph.PlanEstimate`: what a call of a plan costs on a machine.

use pyo3::prelude::*;
use tessera_estimate::ArrayCost;

/// The estimated cost of a call of every program of a plan on a machine.
#[pyclass(frozen, get_all, eq, module = "tessera.graph")]
#[derive(Clone, PartialEq)]
pub(crate) struct PlanEstimate {
    ns: f64,
    exposed_ns: f64,
    sent_bytes: f64,
    flops: f64,
    fetch_wait_ns: f64,
    fetched_bytes: f64,
}

impl From<ArrayCost> for PlanEstimate {
    fn from(cost: ArrayCost) -> PlanEstimate {
        PlanEstimate {
            ns: cost.ns,
            exposed_ns: cost.exposed_ns,
            sent_bytes: cost.sent_bytes,
            flops: cost.flops,
            fetch_wait_ns: cost.fetch_wait_ns,
            fetched_bytes: cost.fetched_bytes,
        }
    }
}

#[pymethods]
impl PlanEstimate {
    fn __repr__(&self) -> String {
        let PlanEstimate { ns, exposed_ns, sent_bytes, flops, fetch_wait_ns, fetched_bytes } = self;
        format!(
            "PlanEstimate(ns={ns:.0}, exposed_ns={exposed_ns:.0}, sent_bytes={sent_bytes:.0}, flops={flops:.3e}, \
             fetch_wait_ns={fetch_wait_ns:.0}, fetched_bytes={fetched_bytes:.0})"
        )
    }
}
