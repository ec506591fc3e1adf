//! `tessera.runtime.set_stream_map` and `enable_overlap`: how the streams of the next plans are numbered, and which of them
//! may run at the same time.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use tessera::arrays::StreamIds;
use tessera_base::Diagnostic;
use tessera_cli::codes::T1506;
use tessera_plan::layouts::StreamOverlap;

use crate::errors::{OrRaise, raise_one};

/// The streams that a map must number. A pipeline's stream may be left out, because most meshes have no stages.
const STREAMS: [&str; 4] = ["compute", "tp_collective", "a2a", "io"];
const OPTIONAL_STREAM: &str = "pp";

/// The settings of plans that are made from now on.
#[derive(Debug, Clone)]
pub(crate) struct StreamSettings {
    /// Number of each stream, as traces show it.
    pub(crate) ids: BTreeMap<String, u32>,
    pairs: Vec<(String, String)>,
    pub(crate) overlap: StreamOverlap,
}

static SETTINGS: Mutex<Option<StreamSettings>> = Mutex::new(None);

impl StreamSettings {
    fn new() -> StreamSettings {
        let ids = StreamIds::default().by_name().clone();
        StreamSettings { ids, pairs: Vec::new(), overlap: StreamOverlap::none() }
    }

    /// Returns the settings of a plan that is made now.
    pub(crate) fn current() -> StreamSettings {
        lock().clone().unwrap_or_else(StreamSettings::new)
    }
}

fn lock() -> MutexGuard<'static, Option<StreamSettings>> {
    SETTINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Numbers the streams of the plans that are made from now on.
#[pyfunction]
pub(crate) fn set_stream_map(py: Python<'_>, streams: BTreeMap<String, u32>) -> PyResult<()> {
    let names = STREAMS.join(", ");
    let refuse = |message: String| {
        let hint = format!("number each of {names} once; {OPTIONAL_STREAM} may be left out");
        Err(raise_one(py, Diagnostic::error(&T1506, message).with_hint(hint)))
    };
    if let Some(unknown) = streams.keys().find(|k| !STREAMS.contains(&k.as_str()) && *k != OPTIONAL_STREAM) {
        return refuse(format!("no stream is called {unknown:?}"));
    }
    if let Some(missing) = STREAMS.into_iter().find(|name| !streams.contains_key(*name)) {
        return refuse(format!("stream {missing:?} has no number"));
    }
    let mut by_id: BTreeMap<u32, &str> = BTreeMap::new();
    for (name, id) in &streams {
        if let Some(other) = by_id.insert(*id, name) {
            return refuse(format!("streams {other:?} and {name:?} both have the number {id}"));
        }
    }
    let mut settings = lock();
    settings.get_or_insert_with(StreamSettings::new).ids = streams;
    Ok(())
}

/// States which pairs of streams may run at the same time, in the plans that are made from now on. All others are
/// serialised.
#[pyfunction]
pub(crate) fn enable_overlap(py: Python<'_>, pairs: Vec<(String, String)>) -> PyResult<()> {
    let words: Vec<(&str, &str)> = pairs.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
    let overlap = StreamOverlap::new(&words).or_raise(py)?;
    let mut settings = lock();
    let settings = settings.get_or_insert_with(StreamSettings::new);
    (settings.pairs, settings.overlap) = (pairs, overlap);
    Ok(())
}

/// Returns the numbers of the streams and the pairs that may overlap.
#[pyfunction]
pub(crate) fn stream_settings() -> (BTreeMap<String, u32>, Vec<(String, String)>) {
    let settings = StreamSettings::current();
    (settings.ids, settings.pairs)
}
