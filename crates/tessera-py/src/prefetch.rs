//! `tessera.runtime.register_prefetch`: the experts of a layer in two tiers of memory.

use pyo3::prelude::*;
use tessera_base::{Diagnostic, format_choices};
use tessera_ir::{EvictionPolicy, StreamKind};

use crate::errors::raise_one;
use crate::expert_tier::{TierRequest, refuse};
use crate::moe::Moe;

/// The tiers as the mapping guide calls them, the fast one first. On CPU ranks they are pools of the rank and the memory
/// of the host, on GPUs device memory and pinned host memory.
const TIERS: [&str; 2] = ["HBM", "Grace"];

/// Experts that a token uses and that may arrive meanwhile: the default of `resident`, per expert of a token.
const RESIDENT_PER_CHOICE: u64 = 2;

/// Keeps the experts of a layer in host memory, and a few of them in fast memory, in the programs that are traced from
/// now on.
#[pyfunction]
#[pyo3(signature = (layer, window=2, tier_order=vec!["HBM".to_string(), "Grace".to_string()], policy="lru_hotness", stream="io", *, resident=None))]
pub(crate) fn register_prefetch(
    layer: &Bound<'_, PyAny>,
    window: u64,
    tier_order: Vec<String>,
    policy: &str,
    stream: &str,
    resident: Option<u64>,
) -> PyResult<()> {
    let py = layer.py();
    let request = (|| {
        let found = layer.get_type().name().map(|name| name.to_string()).unwrap_or_default();
        let moe = layer.cast::<Moe>().map_err(|_| {
            refuse(format!("a {found} has no experts to fetch"), "register what op.moe(…) returns")
        })?;
        let moe = moe.get();
        check_tiers(&tier_order)?;
        check_stream(stream)?;
        let policy = EvictionPolicy::from_name(policy).ok_or_else(|| {
            let names = EvictionPolicy::ALL.map(EvictionPolicy::name);
            refuse(
                format!("no policy is called {policy:?}"),
                &format!("policies are {}", format_choices(&names)),
            )
        })?;
        if window == 0 {
            let message = "window = 0 requests no expert before its layer starts";
            return Err(refuse(message.into(), "state how many layers ahead experts are requested, from 1"));
        }
        let (experts, per_token) = (moe.expert_count(), moe.most_experts());
        let resident = resident.unwrap_or_else(|| experts.min(RESIDENT_PER_CHOICE * per_token));
        if resident == 0 || resident > experts {
            let message = format!("resident = {resident} of {experts} experts");
            return Err(refuse(message, "keep 1 expert in fast memory, or up to all"));
        }
        moe.tier.register(TierRequest { resident, window, policy })
    })();
    request.map_err(|d| raise_one(py, d))
}

fn check_tiers(order: &[String]) -> Result<(), Diagnostic> {
    let hint = "state tier_order=[\"HBM\", \"Grace\"]";
    if let Some(unknown) = order.iter().find(|tier| !TIERS.contains(&tier.as_str())) {
        return Err(refuse(format!("no tier of memory is called {unknown:?}"), hint));
    }
    match order == TIERS {
        true => Ok(()),
        false => {
            let message = format!("tier_order = {order:?}: each tier stands once, the fast one first");
            Err(refuse(message, hint))
        }
    }
}

fn check_stream(stream: &str) -> Result<(), Diagnostic> {
    let hint = "experts move on the stream \"io\"";
    match StreamKind::parse(stream) {
        Some(StreamKind::Io) => Ok(()),
        Some(_) => Err(refuse(format!("the stream {stream:?} moves nothing between tiers of memory"), hint)),
        None => Err(refuse(format!("no stream is called {stream:?}"), hint)),
    }
}
