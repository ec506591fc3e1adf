//! `tessera.runtime.generate`: texts, piece by piece, while the ranks generate the next ones.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use tessera::files::RunFolder;
use tessera::generate::{
    GenerateOptions, LanguagePlace, LanguagePlan, LiveText, Sampling, TextExtents, TextModel, TextPiece,
    TextRequest,
};
use tessera::{Mapping, Mesh, WeightsBase};
use tessera_base::Diagnostics;

use crate::errors::OrRaise;
use crate::session::{parse_device, rank_command};
use crate::waiting::{LiveRun, abandon, wait_for, wait_on};

/// One prompt, or several.
#[derive(FromPyObject)]
pub(crate) enum Prompts {
    One(String),
    Several(Vec<String>),
}

/// A run of texts.
#[pyclass(frozen, module = "tessera.runtime")]
pub(crate) struct TextStream {
    live: LiveText,
    /// Whether the user gave one prompt and not a list.
    is_single: bool,
}

/// Continues texts with a language model.
#[pyfunction]
#[pyo3(signature = (
    model_folder, prompt, *, max_tokens=64, temperature=0.0, seed=0, mesh="tp=1", device="cpu", oversubscribe=false
))]
#[allow(clippy::too_many_arguments, reason = "they are the keywords of a Python function")]
pub(crate) fn generate(
    py: Python<'_>,
    model_folder: PathBuf,
    prompt: Prompts,
    max_tokens: u32,
    temperature: f32,
    seed: u32,
    mesh: &str,
    device: &str,
    oversubscribe: bool,
) -> PyResult<TextStream> {
    let (is_single, prompts) = match prompt {
        Prompts::One(prompt) => (true, vec![prompt]),
        Prompts::Several(prompts) => (false, prompts),
    };
    if prompts.is_empty() || max_tokens == 0 {
        return Err(PyValueError::new_err(
            "a run of texts has at least one prompt, and max_tokens is at least 1",
        ));
    }
    if !temperature.is_finite() || temperature < 0.0 {
        let message = format!("temperature = {temperature}: it is a number from 0");
        return Err(PyValueError::new_err(message));
    }
    let device = parse_device(device)?;
    let mapping = Mapping { mesh: mesh.parse::<Mesh>().or_raise(py)?, ..Mapping::default() };
    let sampling = Sampling { temperature, top_k: 0, top_p: 1.0, seed };
    let argv = rank_command(py)?;
    let start = move || {
        let model = TextModel::open(&model_folder)?;
        let ids = model.encode_prompts(&prompts, None).map_err(|d| vec![d])?;
        let settings = TextExtents::with_max_ids(u64::from(max_tokens)).choose_settings(&ids, device);
        let plan = Arc::new(LanguagePlan::new(&model.decoder, &mapping, settings)?);
        let request = |prompt| TextRequest { prompt, max_ids: max_tokens as usize, sampling, kind: None };
        let options = GenerateOptions {
            weights: LanguagePlace { dir: model_folder, base: WeightsBase::Files },
            device,
            requests: ids.into_iter().map(request).collect(),
            prompts,
            out: PathBuf::new(),
            threads: None,
            oversubscribe,
            wire_dump: false,
            drill: None,
            command: Vec::new(),
        };
        let folder = RunFolder::new(None, "tessera-generate").map_err(|d| vec![d])?;
        LiveText::start(model, plan, options, argv, folder)
    };
    let live = wait_for(py, start, || ())?.or_raise(py)?;
    Ok(TextStream { live, is_single })
}

#[pymethods]
impl TextStream {
    fn __iter__(this: Py<TextStream>) -> Py<TextStream> {
        this
    }

    /// Waits for the next piece: text for one prompt, and otherwise the index of a text with a piece of it.
    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let Some(TextPiece { text, piece, .. }) = wait_on(py, &self.live, || self.next_shown())? else {
            return Ok(None);
        };
        let item = if self.is_single {
            piece.into_pyobject(py)?.into_any()
        } else {
            (text, piece).into_pyobject(py)?.into_any()
        };
        Ok(Some(item.unbind()))
    }

    /// The whole text of the only prompt, after the end.
    #[getter]
    fn text(&self, py: Python<'_>) -> PyResult<String> {
        if !self.is_single {
            return Err(PyRuntimeError::new_err("a run of several prompts has no single text: read `texts`"));
        }
        Ok(self.texts(py)?.pop().unwrap_or_default())
    }

    /// The whole texts, after the end.
    #[getter]
    fn texts(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        py.detach(|| self.live.texts()).ok_or_else(|| {
            PyRuntimeError::new_err("the texts have not ended: take all pieces, or close the run")
        })
    }

    /// Process ids of the ranks, in rank order.
    #[getter]
    fn process_ids(&self) -> Vec<u32> {
        self.live.process_ids().to_vec()
    }

    /// Ends the run after the call that is under way, and waits for its processes.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        wait_on(py, &self.live, || self.live.close())
    }

    fn __enter__(this: Py<TextStream>) -> Py<TextStream> {
        this
    }

    #[pyo3(signature = (kind=None, _value=None, _traceback=None))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyAny>>,
        _value: Option<&Bound<'_, PyAny>>,
        _traceback: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        if kind.is_some() {
            // The exception that leaves the context says what went wrong.
            abandon(py, &self.live);
            return Ok(());
        }
        self.close(py)
    }
}

impl TextStream {
    /// Waits for the next piece that shows something: an id that holds a part of a character shows nothing yet.
    fn next_shown(&self) -> Result<Option<TextPiece>, Diagnostics> {
        loop {
            match self.live.next_piece()? {
                Some(piece) if piece.piece.is_empty() => {}
                next => return Ok(next),
            }
        }
    }
}

impl Drop for TextStream {
    fn drop(&mut self) {
        // Without an interpreter the process is about to end, and its ranks end with it.
        let _ = Python::try_attach(|py| abandon(py, &self.live));
    }
}

impl LiveRun for LiveText {
    fn kill(&self) {
        LiveText::kill(self);
    }

    fn close(&self) -> Result<(), Diagnostics> {
        LiveText::close(self)
    }
}
